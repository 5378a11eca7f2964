"""A training that waits for each of its versions while an engine joins: not for what that engine does not get."""

from __future__ import annotations

import threading

import pytest

from megastream.protocol.records import Committed, Detached
from megastream.sync import TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.memory_log import MemoryStore
from tests.helpers.spine import engine, eventually, train, trainer_settings


@pytest.mark.full
def test_a_late_joiner_is_not_waited_for_before_it_takes_versions() -> None:
    """It joins with the version before the one that its step makes, which goes to the others only."""
    store, together, comes = MemoryStore(), threading.Barrier(4), threading.Event()
    joined: list[int] = []
    last: list[int] = []
    served: list[tuple[list[int], list[str]]] = []

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        version, left = sync.attach().version, 3
        while left:
            version += 1
            train_step(sync, trainer, version)
            sync.wait_committed(version, 20)
            if "b" in sync.opening.joined and sync.rank == 0:
                joined.append(version - 1)
            if version == 2:
                comes.set()
            together.wait(20)
            left -= bool(joined)
        last[:] = [version]
        sync.finished("done")

    def come() -> None:
        comes.wait(20)
        with engine("tp2 ep2", store=store, name="b") as b:
            eventually(lambda: len(b.own(Detached)) == 1, 30)
            served.append(([record.version for record in b.own(Committed)], b.differing(last[0])))

    with engine("tp1 pp2", store=store, name="a") as a:
        thread = threading.Thread(target=come)
        thread.start()
        settings = trainer_settings("t", late_joiners=True)
        assert train(store, body, settings=settings) == [None] * 4
        thread.join(30)
        assert [record.version for record in a.own(Committed)] == list(range(1, last[0] + 1))
    ((versions, differing),) = served
    assert versions[0] == joined[0] and joined[0] + 1 not in versions and versions[-1] == last[0] and differing == []
