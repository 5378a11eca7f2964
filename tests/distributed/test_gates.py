"""Parts of a version over real lanes: which bytes are live after each, and what a commit that fails leaves behind."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from megastream.engine.agent import RankAgent
from megastream.engine.attachment import Attachment
from megastream.engine.contract import CommitRequest
from megastream.plan.unit import experts_of
from megastream.protocol.mix import Gate
from megastream.protocol.part_records import Mixed, PartCommitted
from megastream.protocol.records import Committed, Failed, Poisoned, Record
from megastream.protocol.step_records import Withdrawn
from megastream.sync import EngineSync, SyncError, TrainerSync
from megastream.transport.gloo_lane import GlooReceiveLane
from tests.helpers.fake_trainer import FakeTrainer, fill, train_step
from tests.helpers.memory_log import MemoryLog
from tests.helpers.spine import Engine, engine, eventually, train, trainer_settings

EARLY = {"stage": lambda tensor: "layers.2." not in tensor and "layers." in tensor or "embed" in tensor}
EARLY["idle_experts"] = lambda tensor: ".experts." in tensor
"""Tensors of the first stage (embedding and layers 0 and 1), and those of experts."""


def step_in_halves(
    sync: TrainerSync, trainer: FakeTrainer, e: Engine, gate: Gate, seen: list[set[str]], version: int = 1
) -> None:
    """What can become live early does, and rank 0 looks at the live bytes before the rest is sent."""
    sync.begin(version, train_step=version)
    fill(trainer.layout, trainer.buffers, version)
    sync.accept()
    is_early = {
        shard.buffer: trainer.layout.coords["pp"] == 0 if gate == "stage" else shard.buffer.startswith("expert")
        for shard in trainer.layout.shards
    }
    for buffer in trainer.buffers:
        if is_early[buffer]:
            sync.final(buffer)
    early = {unit for unit in sync.plan.units if (unit.startswith("s0") if gate == "stage" else experts_of(unit))}
    parts = lambda: [record.units for record in e.records(PartCommitted) if record.version == version]  # noqa: E731
    eventually(lambda: {unit for units in parts() for unit in units} == early)
    if sync.rank == 0:
        seen += [{name.split(" ")[1].strip("()") for name in e.differing(v)} for v in (version - 1, version)]
    for buffer in trainer.buffers:
        if not is_early[buffer]:
            sync.final(buffer)
    sync.finish()
    sync.wait_committed(version, 10)


@pytest.mark.parametrize(
    ("mesh", "gate"),
    [
        ("tp1 pp2", "stage"),  # each engine rank holds one stage only
        ("tp2 ep2", "idle_experts"),
        pytest.param("tp2 ep2", "stage", marks=pytest.mark.full),
        pytest.param("tp1 pp2", "idle_experts", marks=pytest.mark.full),
    ],
)
def test_what_is_live_early_is_of_the_new_version_and_the_rest_of_the_old(mesh: str, gate: Gate) -> None:
    seen: list[set[str]] = []

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        step_in_halves(sync, trainer, e, gate, seen)
        sync.finished("done")

    with engine(mesh, gate=gate) as e:
        wrong = e.watch()
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        changed, unchanged = seen
        assert changed and unchanged and not changed & unchanged
        assert all(EARLY[gate](tensor) for tensor in changed) and not any(map(EARLY[gate], unchanged))
        labels = [request.label for request in e.core.commits]
        assert labels[-1] == "1" and all(label.startswith("0..1+") for label in labels[:-1])
        host, mixes = EngineSync(MemoryLog(e.store), engine="e"), [request.mix for request in e.core.commits[:-1]]
        assert [host.versions(mix.label) for mix in mixes] == [mix.vector() for mix in mixes]
        assert e.differing(1) == wrong == []


@pytest.mark.full
def test_the_gate_is_switched_from_version_to_version_and_holds_for_the_next_attachment() -> None:
    def switch(sync: TrainerSync, gate: str) -> None:
        if sync.rank == 0:
            host.set_gate(gate)
        barrier.wait(10)

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        train_step(sync, trainer, 1)
        sync.wait_committed(1, 10)
        for version, gate in ((2, "stage"), (3, "idle_experts")):
            switch(sync, gate)
            step_in_halves(sync, trainer, e, gate, [], version)
        switch(sync, "version")
        train_step(sync, trainer, 4)
        sync.wait_committed(4, 10)
        sync.finished("done")

    def again(sync: TrainerSync, trainer: FakeTrainer) -> None:
        version = sync.attach().version + 1
        step_in_halves(sync, trainer, e, "stage", [], version)
        sync.finished("done")

    barrier = threading.Barrier(4)
    with engine("tp1 pp2") as e:
        host, wrong = EngineSync(MemoryLog(e.store), engine="e"), e.watch()
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        host.set_gate("stage")
        assert train(e.store, again, version=5, settings=trainer_settings("b")) == [None] * 4
        assert {record.version for record in e.records(PartCommitted)} == {2, 3, 6}
        for word, reason in (("pause", "attach with kind whole"), ("idle", "choose one of")):
            with pytest.raises(SyncError, match=f"stays at gate stage: .*{reason}"):
                host.set_gate(word)
        assert wrong == [] and [record.version for record in e.records(Committed)] == [1, 2, 3, 4, 5, 6]


def lose_a_unit(sink: Any) -> None:
    """Broken: this rank leaves one unit of each part as it was, and says that all is well."""
    honest = type(sink).commit.__get__(sink)

    def commit(request: CommitRequest) -> str:
        if request.mix is None:
            return honest(request)
        lost = next((unit for unit in request.units if unit in sink.units), "")
        return honest(replace(request, units=tuple(unit for unit in request.units if unit != lost)))

    sink.commit = commit


@pytest.mark.full
def test_a_part_that_one_rank_does_not_write_is_seen() -> None:
    """Every expert unit is prepared by itself, so it can be left out."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        lose_a_unit(e.agents[1]._current.sink)
        step_in_halves(sync, trainer, e, "idle_experts", [])
        sync.finished("done")

    with engine("tp2 ep2", gate="idle_experts") as e:
        wrong = e.watch()
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert all(".experts." in name for name in wrong)
        assert any(name.startswith("version 0..1+") for name in wrong)


@pytest.mark.parametrize("failures", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_part_that_fails_is_repeated_and_else_the_version_is_written_whole(failures: int) -> None:
    """One rank's copy fails in the part while the other's succeeded."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        e.lives[1].break_commits = failures
        sync.begin(1, train_step=1)
        fill(trainer.layout, trainer.buffers, 1)
        sync.accept()
        if trainer.layout.coords["pp"] == 1:
            eventually(lambda: len(e.core.commits) == 1)
        for buffer in trainer.buffers:
            sync.final(buffer)
        sync.finish()
        sync.wait_committed(1, 10)  # a trainer waits on although a part has poisoned the engine
        sync.finished("done")

    with engine("tp2 ep2", gate="stage") as e:
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert len(e.records(PartCommitted)) == 2 - failures and len(e.records(Poisoned)) == failures - 1
        assert (e.core.commits[-1].units is None) is (failures == 2)
        assert e.differing(1) == []


def hold_lanes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Pieces of the second stage's version 1 stay on their lanes until the event is set."""
    honest, go = GlooReceiveLane.finish_payload, threading.Event()

    def held(self: GlooReceiveLane, header: Any, deadline_s: float) -> None:
        if header.version == 1 and header.unit.startswith("s1"):
            go.wait(20)
        honest(self, header, deadline_s)

    monkeypatch.setattr(GlooReceiveLane, "finish_payload", held)
    return go


def forget_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a rank drops what the trainer took back when it reads that, not behind the commits before it."""
    honest = RankAgent._take_own

    def hasty(self: RankAgent, current: Attachment, record: Record) -> None:
        honest(self, current, record)
        if isinstance(record, Withdrawn):
            current.sink.withdrawn(record.version, record.attempt)

    monkeypatch.setattr(RankAgent, "_take_own", hasty)


@pytest.mark.parametrize("is_hasty", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_version_whose_rest_is_taken_back_is_followed_by_a_whole_one(
    is_hasty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is slow with the second stage, so that the next step takes the rest back. The commit of the first
    stage waits in the core's queue until everybody has heard of it."""
    go, asked, barrier = hold_lanes(monkeypatch), [], threading.Barrier(4)
    if is_hasty:
        forget_at_once(monkeypatch)

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        e.core.hold.clear()
        barrier.wait(10)
        sync.begin(1, train_step=1)
        fill(trainer.layout, trainer.buffers, 1)
        sync.accept()
        for buffer in trainer.buffers:
            sync.final(buffer)
        sync.finish()
        eventually(lambda: bool(asked))
        sync.begin(2, train_step=2)
        go.set()
        eventually(lambda: len(e.records(Withdrawn)) == len(e.records(Mixed)) == 1)
        e.core.hold.set()
        sync.accept()
        sync.finish()
        barrier.wait(10)
        train_step(sync, trainer, 3)
        sync.wait_committed(3, 10)
        sync.finished("done")

    with engine("tp2 ep2", gate="stage") as e:
        wrong, commit = e.watch(), e.core.commit
        e.core.commit = lambda request, done: (asked.append(request), commit(request, done))  # type: ignore[method-assign]
        settings = trainer_settings("a", lag_s=0.2, slots_per_target=1)
        assert train(e.store, body, settings=settings) == [None] * 4
        assert [record.version for record in e.records(Committed)] == [3] and e.differing(3) == []
        assert e.core.commits[-1].units is None and e.records(Failed) == []
        assert (len(e.records(PartCommitted)), len(e.records(Poisoned))) == ((0, 1) if is_hasty else (1, 0))
        assert is_hasty or wrong == []
