"""Experts swapped by hand on a fake engine: real agents, lanes and coordinator. Live bytes are held against tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megastream.protocol.journal import SyncError
from megastream.protocol.records import Attach, Attached, Committed, Detached, Failed, Poisoned
from megastream.sync import TrainerSync
from megastream.sync.swap import swap
from megastream.trainer.checkpoint_experts import CheckpointExperts
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.memory_log import MemoryLog
from tests.helpers.spine import Engine, engine, eventually, train, trainer_settings
from tests.helpers.swapped import EXPERT, NAMES, write
from tests.helpers.synthetic import differing

pytestmark = pytest.mark.full


def wrong(e: Engine, version_of: Callable[[str], int]) -> list[str]:
    return [name for live in e.lives for name in differing(live.layout, live.buffers, version_of)]


@pytest.mark.parametrize(
    ("mesh", "gate"),
    [
        ("tp1 pp2", "version"),  # a rank that holds nothing of it
        ("tp2", "version"),
        ("tp2 ep2", "idle_experts"),
        ("tp1 pp2", "stage"),
    ],
)
def test_an_expert_is_swapped_taken_back_and_followed_by_a_trainer(mesh: str, gate: str, tmp_path: Path) -> None:
    old, new = write(tmp_path / "old", 0), write(tmp_path / "new", 7)

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        train_step(sync, trainer, sync.next_version, 11)
        sync.finished("done")

    with engine(mesh, gate=gate) as e:  # type: ignore[arg-type]
        log = MemoryLog(e.store)
        done = swap(log, CheckpointExperts(new, [EXPERT]), deadline_s=10)
        assert (done.engine, done.over, done.version, done.units) == ("e", 0, 1, ("s0.l1.e4:5",))
        assert wrong(e, lambda tensor: 7 if tensor in NAMES else 0) == []
        assert {name.split("(")[1].rstrip(")") for name in e.differing(0)} == set(NAMES), "the detector sees a swap"
        done = swap(log, CheckpointExperts(old, [EXPERT]), deadline_s=10)
        assert (done.over, done.version) == (1, 2) and e.differing(0) == []
        assert [request.label for request in e.core.commits] == ["1", "2"]
        assert len(e.records(Attach)) == len(e.records(Detached)) == 2 and e.records(Failed) == []
        assert all(agent.live_version == 2 for agent in e.agents)
        assert train(e.store, body, version=9, settings=trainer_settings("t")) == [None] * 4
        assert e.differing(11) == [] and e.records(Attached)[-1].version == 3


def test_what_stands_against_a_swap_is_named_and_nothing_changes(tmp_path: Path) -> None:
    """A trainer that is attached, also to another engine, and goes on; an unknown engine; one that is gone."""
    part, refusals, asked = CheckpointExperts(write(tmp_path / "c", 7), [EXPERT]), [], threading.Event()

    def refusal(name: str) -> str:
        with pytest.raises(SyncError) as raised:
            swap(log, part, engine=name, deadline_s=5)
        return str(raised.value)

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        if sync.rank == 0:
            refusals.extend([refusal("e"), refusal("f")])
            asked.set()
        asked.wait(20)
        train_step(sync, trainer, 1)
        sync.wait_committed(1, 10)
        sync.finished("done")

    with engine("tp1 pp2") as e, engine("tp2", store=e.store, name="f") as f:
        log = MemoryLog(e.store)
        eventually(lambda: "several engines are up" in refusal(""))
        assert "no engine g has come up in run run at memory; up are: e, f" in refusal("g")
        assert train(e.store, body, settings=trainer_settings("t", engine="e")) == [None] * 4
        assert all("engine e is attached to incarnation 1 (i1)" in each for each in refusals) and len(refusals) == 2
        assert e.differing(1) == f.differing(0) == []
        e.store.silent_s = None
        assert "engine e is not on the control plane" in refusal("e")
        assert "no engine is on the control plane" in refusal("")


def test_a_swap_whose_copy_fails_is_repeated_and_else_the_engine_says_that_it_is_poisoned(tmp_path: Path) -> None:
    part = CheckpointExperts(write(tmp_path / "c", 7), [EXPERT])
    with engine("tp2") as e:
        e.lives[1].break_commits = 1
        assert swap(MemoryLog(e.store), part, deadline_s=10).version == 1
        e.lives[1].break_commits = 2
        with pytest.raises(SyncError, match="could not take the base version: rank 1: .*the copy failed"):
            swap(MemoryLog(e.store), part, deadline_s=10)
        assert len(e.records(Poisoned)) == 1 and [record.version for record in e.records(Committed)] == [1]
        with pytest.raises(SyncError, match="engine e is poisoned: .*a whole version of a trainer has to come first"):
            swap(MemoryLog(e.store), part, deadline_s=10)
