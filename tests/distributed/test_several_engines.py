"""Several engines of one trainer, over real gloo lanes: each with its own plan, lanes, slots and pace. No Megatron."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from megastream.protocol import bind
from megastream.protocol.mix import Gate
from megastream.protocol.records import Attach, Attached, Committed, Detached, Emitted, Failed, WeightsReady
from megastream.protocol.step_records import Opened, Withdrawn
from megastream.sync import SyncError, TrainerSync
from megastream.sync.feed import Feed
from megastream.transport.gloo_lane import GlooReceiveLane
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.memory_log import MemoryStore
from tests.helpers.spine import ENGINE_SETTINGS, Engine, engine, eventually, train, trainer_settings

ALL_SLOTS = 10**6
GATES = ["version", *(pytest.param(gate, marks=pytest.mark.full) for gate in ("stage", "idle_experts"))]


def versions(e: Engine) -> list[int]:
    """What became live, in order."""
    return [record.version for record in e.own(Committed)]


def whole(e: Engine) -> list[int]:
    """What has arrived, in order."""
    return [record.version for record in e.own(WeightsReady)]


def test_two_engines_of_different_layouts_take_every_version() -> None:
    """And every step says how long packing waited for slots in the version before, for the slower one."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        for version in (1, 2, 3):
            train_step(sync, trainer, version)
            slot_waits[version - 1, sync.rank] = sync.opening.slot_wait_s
            sync.wait_committed(version, 10)
        assert sync.engines == ["a", "b"] and sync.live_version == 3
        looked.wait(10)  # whoever has finished ends the attachments of all
        sync.finished("done")

    store, slot_waits, looked = MemoryStore(), {}, threading.Barrier(4)
    with engine("tp1 pp2", store=store, name="a") as a, engine("tp2 ep2", store=store, name="b") as b:
        wrong = a.watch() + b.watch()
        assert train(store, body, settings=trainer_settings("t", engines=2)) == [None] * 4
        for (version, rank), waited_s in slot_waits.items():
            emitted = [record for record in a.records(Emitted) if (record.version, record.rank) == (version, rank)]
            assert len(emitted) == 2 and waited_s == max(record.wait_s for record in emitted)
        assert sum(slot_waits.values()) > 0.0
        for each in (a, b):
            assert versions(each) == [1, 2, 3] and each.differing(3) == [] and len(each.own(Detached)) == 1
        assert wrong == [] and a.records(Failed) == []
        assert [record.takes for record in a.records(Opened) if record.version == 2] == [("i1", "i1-2")]


@pytest.mark.full
def test_engines_with_equal_layouts_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: Any, **options: Any) -> Any:
        if not threading.current_thread().name.startswith("megastream-engine-rank"):
            built.append(1)
        return real(*args, **options)

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        train_step(sync, trainer, 1)
        sync.wait_committed(1, 10)
        sync.finished("done")

    real, built, store = bind.build_plan, [], MemoryStore()
    monkeypatch.setattr(bind, "build_plan", build)
    with engine("tp1 pp2", store=store, name="a") as a, engine("tp1 pp2", store=store, name="b") as b:
        assert train(store, body, settings=trainer_settings("t", engines=2)) == [None] * 4
        assert a.differing(1) == b.differing(1) == []
    assert len(built) == 4, "one plan on each trainer rank"


@pytest.mark.parametrize("gate", GATES)
def test_an_engine_that_stands_still_skips_versions_and_holds_nobody_up(gate: Gate) -> None:
    """The core of `b` stands in a commit while `a` takes seven versions. None is withdrawn: slots hold all of it."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        if sync.rank == 0:
            b.core.hold.clear()
        barrier.wait(10)
        for version in range(1, 8):
            train_step(sync, trainer, version)
            eventually(lambda version=version: version in versions(a))  # type: ignore[misc]
            if version <= 2:  # b's staging has room for two
                eventually(lambda version=version: version in whole(b))  # type: ignore[misc]
            openings.append(sync.opening)
            waits_s[sync.rank] += sync.opening.wait_s
        barrier.wait(10)
        b.core.hold.set()
        sync.finished("done")

    barrier, openings, store = threading.Barrier(4), [], MemoryStore()
    lag_s, waits_s = 1.0, [0.0] * 4
    settings = trainer_settings("t", engines=2, lag_s=lag_s, slots_per_target=ALL_SLOTS)
    with engine("tp1 pp2", store=store, name="a") as a, engine("tp2 ep2", gate=gate, store=store, name="b") as b:
        wrong = a.watch() + b.watch()
        assert train(store, body, settings=settings) == [None] * 4
        assert versions(a) == [1, 2, 3, 4, 5, 6, 7]
        assert versions(b)[-1] == 7, "what it had skipped when training ended is sent behind the last step"
        assert {4, 5, 6} & set(versions(b)) == set()
        assert a.differing(7) == b.differing(7) == wrong == []
    skipped = {opening.version for opening in openings if opening.skipped == ("b",)}
    assert {5, 6, 7} <= skipped and 1 not in skipped
    assert max(opening.wait_s for opening in openings) >= lag_s, "the first step that it skipped waited for it"
    assert max(waits_s) < 2 * lag_s, "and that one alone, though it skipped several"
    assert all(opening.withdrawn == () for opening in openings)


@pytest.mark.full
@pytest.mark.parametrize("gate", ["version", "stage", "idle_experts"])
def test_a_lease_that_is_held_too_long_is_revoked_and_a_later_version_arrives_whole(gate: Gate) -> None:
    """One slot only: version 2 waits unpacked for the staging of `b`, whose core stands. The step takes it back."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        if sync.rank == 0:
            b.core.hold.clear()
        barrier.wait(10)
        for version in (1, 2, 3):
            train_step(sync, trainer, version)
            eventually(lambda version=version: version in versions(a))  # type: ignore[misc]
            if version == 1:  # b's staging has room for one
                eventually(lambda: 1 in whole(b))
            openings.append(sync.opening)
        barrier.wait(10)
        b.core.hold.set()
        eventually(lambda: bool(b.own(Withdrawn)))
        train_step(sync, trainer, 4)
        sync.wait_committed(4, 10)
        sync.finished("done")

    barrier, openings, store = threading.Barrier(4), [], MemoryStore()
    settings = trainer_settings("t", engines=2, lag_s=0.2, slots_per_target=1)
    single = replace(ENGINE_SETTINGS, staging_sets=1)
    with (
        engine("tp1 pp2", store=store, name="a") as a,
        engine("tp2 ep2", settings=single, gate=gate, store=store, name="b") as b,
    ):
        wrong = a.watch() + b.watch()
        assert train(store, body, settings=settings) == [None] * 4
        assert versions(a) == [1, 2, 3, 4] and versions(b) == [1, 4]
        assert {record.version for record in b.own(Withdrawn)} == {2} and a.own(Withdrawn) == []
        assert wrong == [] and a.records(Failed) == []
    assert ("b",) in {opening.withdrawn for opening in openings if opening.version == 3}


def slow_lanes(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    honest = GlooReceiveLane.finish_payload

    def slowly(self: GlooReceiveLane, header: Any, deadline_s: float) -> None:
        if header.attachment == "i1-2":
            time.sleep(seconds)
        honest(self, header, deadline_s)

    monkeypatch.setattr(GlooReceiveLane, "finish_payload", slowly)


class Joining:
    """A training of which engine `b` becomes a part between two steps; then it goes on for three more."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.comes, self.barrier = store, threading.Event(), threading.Barrier(4)
        self.joined_at, self.last = -1, -1

    def body(self, sync: TrainerSync, trainer: FakeTrainer) -> None:
        version = sync.attach().version
        left = 3
        while left:
            version += 1
            train_step(sync, trainer, version)
            if "b" in sync.opening.joined:
                self.joined_at = version - 1
            if version == 2:
                self.comes.set()
            self.barrier.wait(10)
            left -= self.joined_at >= 0
            time.sleep(0.02)
        self.last = version
        sync.finished("done")

    def run(self, **settings: Any) -> list[BaseException | None]:
        return train(self.store, self.body, settings=trainer_settings("t", late_joiners=True, **settings))


@pytest.mark.parametrize("gate", GATES)
def test_a_late_joiner_gets_the_newest_version_whole_although_the_next_step_waits(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_lanes(monkeypatch, 0.005)
    joining, others = Joining(MemoryStore()), []
    with engine("tp1 pp2", store=joining.store, name="a") as a:
        wrong = a.watch()

        def come() -> None:
            joining.comes.wait(20)
            with engine("tp2 ep2", gate=gate, store=joining.store, name="b") as b:
                others.append((b.watch(), b))
                eventually(lambda: len(b.own(Detached)) == 1, 30)
                others.append(b.differing(joining.last))

        thread = threading.Thread(target=come)
        thread.start()
        assert joining.run(slots_per_target=1) == [None] * 4
        thread.join(30)
        (late_wrong, b), differing = others
        attached = b.own(Attached)[0]
        attach = next(record for record in b.own(Attach) if record.engine == "b")
        assert attach.late_joiner and attach.attachment == "i1-2" and attach.base_version <= joining.joined_at
        assert attached.version == joining.joined_at and attached.replaced
        first = b.core.commits[0]
        assert first.attempt == 1 and first.mix is first.units is None, "a new attempt of what others had as attempt 0"
        assert wrong == late_wrong == differing == []
        assert versions(a) == list(range(1, joining.last + 1)), "the others do not notice"


@pytest.mark.full
def test_without_the_lease_a_late_joiner_would_get_two_versions_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_lanes(monkeypatch, 0.005)
    monkeypatch.setattr(Feed, "is_packed_within", lambda self, seconds: True)
    joining, others = Joining(MemoryStore()), []
    with engine("tp1 pp2", store=joining.store, name="a"):

        def come() -> None:
            joining.comes.wait(20)
            with engine("tp2 ep2", store=joining.store, name="b") as b:
                others.append(b.watch())
                eventually(lambda: len(b.own(Detached)) == 1, 30)

        thread = threading.Thread(target=come)
        thread.start()
        joining.run(slots_per_target=1)
        thread.join(30)
    assert any(name.startswith(f"version {joining.joined_at}:") for name in others[0])


@pytest.mark.full
def test_training_goes_on_alone_for_as_long_as_it_may() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        train_step(sync, trainer, 1)
        sync.wait_committed(1, 10)
        barrier.wait(10)
        gone.set()
        version = 1
        while version < 500:
            version += 1
            train_step(sync, trainer, version)
            time.sleep(0.02)
            reached.append(version)

    barrier, gone, reached, store = threading.Barrier(4), threading.Event(), [], MemoryStore()

    def serve() -> None:
        with engine("tp1 pp2", store=store) as e:
            up.append(e)
            gone.wait(20)

    up: list[Engine] = []
    thread = threading.Thread(target=serve)
    thread.start()
    outcomes = train(store, body, settings=trainer_settings("t", late_joiners=True, alone_s=0.5, lag_s=0.2))
    thread.join(10)
    assert all(isinstance(outcome, SyncError) for outcome in outcomes), outcomes
    assert all("no engine was attached for 0.5 s; training stops" in str(outcome) for outcome in outcomes)
    assert max(reached) > 3, "it went on without an engine"


@pytest.mark.full
def test_without_late_joiners_the_first_engine_that_is_lost_ends_the_training() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        barrier.wait(10)
        if sync.rank == 0:
            b.coordinator.close()
        for version in range(1, 100):
            train_step(sync, trainer, version)
            time.sleep(0.02)

    barrier, store = threading.Barrier(4), MemoryStore()
    with engine("tp1 pp2", store=store, name="a"), engine("tp2 ep2", store=store, name="b") as b:
        outcomes = train(store, body, settings=trainer_settings("t", engines=2))
        assert all("core failed: the engine is shutting down" in str(outcome) for outcome in outcomes), outcomes
