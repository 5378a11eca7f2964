"""The last step does not count while an engine is behind: training ends, with every engine at the last that did."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from megastream.protocol.records import Committed, Failed, WeightsReady
from megastream.protocol.step_records import Withdrawn
from megastream.sync import TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.memory_log import MemoryStore
from tests.helpers.spine import ENGINE_SETTINGS, Engine, engine, eventually, train, trainer_settings

ALL_SLOTS = 10**6


def versions(of: Engine) -> list[int]:
    """What became live, in order."""
    return [record.version for record in of.own(Committed)]


class Skipping:
    """`b` stands from the first step on, while `a` takes `steps` versions. One more step does not count."""

    def __init__(self, a: Engine, b: Engine, steps: int, staged: int) -> None:
        self.a, self.b, self.steps, self.staged = a, b, steps, staged
        self.barrier = threading.Barrier(4)

    def body(self, sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        if sync.rank == 0:
            self.b.core.hold.clear()
        self.barrier.wait(10)
        for version in range(1, self.steps + 1):
            train_step(sync, trainer, version)
            eventually(lambda version=version: version in versions(self.a))  # type: ignore[misc]
            if version <= self.staged:
                eventually(lambda version=version: self.b.own(WeightsReady)[-1].version == version)  # type: ignore[misc]
        sync.begin(self.steps + 1, self.steps + 1)
        sync.skip()
        self.barrier.wait(10)
        self.b.core.hold.set()
        sync.catch_up()
        sync.wait_committed(self.steps, 10)
        sync.finished("done")


def test_who_skipped_the_version_before_gets_it_behind_a_last_step_that_does_not_count() -> None:
    """`b` has room for two versions, the third waits for room, the fourth passes it by."""
    store = MemoryStore()
    settings = trainer_settings("t", engines=2, lag_s=0.2, slots_per_target=ALL_SLOTS)
    with engine("tp1 pp2", store=store, name="a") as a, engine("tp2 ep2", store=store, name="b") as b:
        assert train(store, Skipping(a, b, steps=4, staged=2).body, settings=settings) == [None] * 4
        assert versions(a) == [1, 2, 3, 4] and versions(b)[-1] == 4
        assert a.differing(4) == b.differing(4) == a.records(Failed) == []


@pytest.mark.full
def test_nobody_waits_for_a_version_that_was_taken_back_behind_a_last_step_that_does_not_count() -> None:
    """`b` has room and a slot for one: version 2 was accepted, and taken back before the step that is skipped."""
    store, single = MemoryStore(), replace(ENGINE_SETTINGS, staging_sets=1)
    settings = trainer_settings("t", engines=2, lag_s=0.2, slots_per_target=1)
    with (
        engine("tp1 pp2", store=store, name="a") as a,
        engine("tp2 ep2", settings=single, store=store, name="b") as b,
    ):
        assert train(store, Skipping(a, b, steps=2, staged=1).body, settings=settings) == [None] * 4
        assert [record.version for record in b.own(Withdrawn)] == [2]
        assert versions(a) == [1, 2] and versions(b) == [1]
        assert a.differing(2) == b.differing(1) == a.records(Failed) == []
