"""A version that was begun and does not count: taken back over real lanes, dropped by the engine, emitted again."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megastream.engine.contract import CommitRequest
from megastream.engine.stream import StreamSink
from megastream.protocol.mix import Gate
from megastream.protocol.records import Accepted, Committed, Emitted, Failed, Sealed, WeightsReady
from megastream.protocol.step_records import Withdrawn
from megastream.sync import TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.memory_log import MemoryStore
from tests.helpers.spine import Engine, engine, eventually, train, trainer_settings
from tests.helpers.synthetic import fill

ALL_SLOTS = 10**6
GATES = ["version", *(pytest.param(gate, marks=pytest.mark.full) for gate in ("stage", "idle_experts"))]


def num_sent(sync: TrainerSync) -> int:
    """Pieces that have left this rank."""
    lanes = (lane for feed in sync._feeds.all for lane in feed._emitter._lanes.values())
    return sum(lane.counters.pieces for lane in lanes)


@pytest.mark.parametrize("gate", GATES)
def test_a_version_that_does_not_count_is_withdrawn_and_its_next_attempt_goes_live(gate: Gate) -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        train_step(sync, trainer, 1)
        sync.begin(2, train_step=2)  # its step breaks off behind the first bucket on some ranks, behind all on others
        fill(trainer.layout, trainer.buffers, 9)
        names, before = list(trainer.buffers), num_sent(sync)
        for buffer in names if sync.rank % 2 else names[:1]:
            sync.final(buffer)
        if sync.rank % 2:
            eventually(lambda: num_sent(sync) > before)
        train_step(sync, trainer, 2)
        sync.wait_committed(2, 10)
        sync.finished("done")

    with engine("tp1 pp2", gate=gate) as e:
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert e.differing(2) == [] and e.records(Failed) == []
        assert [record.version for record in e.records(Committed)] == [1, 2]
        wasted = [record for record in e.records(Emitted) if (record.version, record.attempt) == (2, 0)]
        assert wasted and all(record.wire_bytes > record.payload_bytes > 0 for record in wasted)
        assert {record.attempt for record in e.records(Accepted) if record.version == 2} == {1}


def versions(of: Engine) -> list[int]:
    """What became live, in order."""
    return [record.version for record in of.own(Committed)]


def whole(of: Engine) -> list[int]:
    return [record.version for record in of.own(WeightsReady)]


@pytest.mark.parametrize("is_last", [False, pytest.param(True, marks=pytest.mark.full)])
def test_an_engine_that_stands_still_in_an_abort_is_not_lost(is_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both staging sets of `b` are full, so a piece of attempt 0 of version 3 lies on its lane and does not arrive.

    The step goes on without it. When it was the last one, version 3 is sent behind it.
    """

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        if sync.rank == 0:
            b.core.hold.clear()
        barrier.wait(10)
        for version in (1, 2):
            train_step(sync, trainer, version)
            eventually(lambda version=version: version in versions(a) and version in whole(b))  # type: ignore[misc]
        sync.begin(3, train_step=3)
        fill(trainer.layout, trainer.buffers, 9)
        for buffer in trainer.buffers:
            sync.final(buffer)
        assert blocked.wait(10)
        train_step(sync, trainer, 3)
        assert (sync.opening.takes, sync.opening.skipped) == (("a",), ("b",))
        eventually(lambda: 3 in versions(a))
        barrier.wait(10)
        b.core.hold.set()
        if not is_last:
            eventually(lambda: [(record.version, record.attempt) for record in b.own(Withdrawn)] == [(3, 0)])
            train_step(sync, trainer, 4)
            sync.wait_committed(4, 10)
        sync.finished("done")

    def admit(sink: StreamSink, header: Any, source: int) -> bool:
        if (header.attachment, header.version) == ("i1-2", 3):
            blocked.set()
        return honest(sink, header, source)

    honest = StreamSink.admit
    monkeypatch.setattr(StreamSink, "admit", admit)
    barrier, blocked, store, last = threading.Barrier(4), threading.Event(), MemoryStore(), 3 if is_last else 4
    settings = trainer_settings("t", engines=2, lag_s=0.3, slots_per_target=ALL_SLOTS)
    with engine("tp1 pp2", store=store, name="a") as a, engine("tp2 ep2", store=store, name="b") as b:
        wrong = a.watch() + b.watch()
        assert train(store, body, settings=settings) == [None] * 4
        assert versions(a) == [1, 2, 3, 4][:last] and versions(b)[-1] == last
        assert is_last or 3 not in versions(b)
        assert a.records(Failed) == wrong == a.differing(last) == b.differing(last) == []


@pytest.mark.parametrize("gate", GATES)
def test_the_engine_forgets_what_it_prepared_of_a_withdrawn_attempt(gate: Gate) -> None:
    """All of attempt 0 is in and sealed on every rank before it is withdrawn."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        e.core.hold.clear()
        sync.begin(1, train_step=1)
        fill(trainer.layout, trainer.buffers, 9)
        for buffer in trainer.buffers:
            sync.final(buffer)
        eventually(lambda: len([r for r in e.records(Sealed) if r.version == 1]) == len(e.agents))
        train_step(sync, trainer, 1)
        eventually(lambda: len([r for r in e.records(Sealed) if r.attempt == 1]) == len(e.agents))
        if sync.rank == 0:
            stale = e.agents[0].commit(CommitRequest("i1", 1, 1, 0))
            e.core.hold.set()
            assert not stale.ok and "attempt 0 is not prepared here" in stale.error
        sync.wait_committed(1, 10)
        sync.finished("done")

    with engine("tp1 pp2", gate=gate) as e:
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert e.differing(1) == []
