"""An engine that takes longer for a version than anybody waits without a word, and acknowledges piece by piece."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megastream.protocol.records import Committed, Failed
from megastream.protocol.step_records import UnderWay, Withdrawn
from megastream.sync import TrainerSync
from megastream.transport.gloo_lane import GlooReceiveLane
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.memory_log import MemoryStore
from tests.helpers.spine import engine, eventually, train, trainer_settings

ALL_SLOTS = 10**6
PIECE_S, DEADLINE_S = 0.5, 2.0


@pytest.mark.full
def test_versions_pass_it_by_and_it_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its base to the last version, which it gets when training ends. The ranks that feed it little wait, too."""
    honest = GlooReceiveLane.finish_payload

    def slowly(self: GlooReceiveLane, header: Any, deadline_s: float) -> None:
        if header.attachment == "i1-2":
            time.sleep(PIECE_S)
        honest(self, header, deadline_s)

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        for version in range(1, 7):
            train_step(sync, trainer, version)
            eventually(lambda version=version: version in [r.version for r in a.own(Committed)])  # type: ignore[misc]
        sync.catch_up()
        sync.finished("done")

    monkeypatch.setattr(GlooReceiveLane, "finish_payload", slowly)
    store, waits = MemoryStore(), dict(transfer_s=DEADLINE_S, detach_s=2 * DEADLINE_S, lag_s=0.1)
    settings = trainer_settings("t", engines=2, slots_per_target=ALL_SLOTS, **waits)
    with engine("tp1 pp2", store=store, name="a") as a, engine("tp2 ep2", store=store, name="b") as b:
        assert train(store, body, settings=settings) == [None] * 4
        taken = [record.version for record in b.own(Committed)]
        assert [record.version for record in a.own(Committed)] == [1, 2, 3, 4, 5, 6]
        assert taken[-1] == 6 and len(taken) < 6
        assert a.records(Failed) == a.records(Withdrawn) == a.differing(6) == b.differing(6) == []
        assert {record.attachment for record in a.records(UnderWay)} == {"i1-2"}
