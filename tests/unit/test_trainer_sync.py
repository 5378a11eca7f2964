"""The trainer's facade on one rank, without engines: what it asks for between steps and at the end, what it says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megastream.protocol.records import Failed
from megastream.sync import Opening, SyncError, TrainerSync
from megastream.sync.feeds import Feeds
from megastream.sync.opening import Boundary, Emission
from megastream.transport.cuda_driver import DriverError
from tests.helpers.fake_trainer import FakeTrainer
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import attach_record
from tests.helpers.spine import TRAINER, eventually, trainer_settings
from tests.helpers.synthetic import trainer_side


class NoEngines:
    """Stands for the boundary of a rank that feeds nobody."""

    def __init__(self) -> None:
        self.feeds = SimpleNamespace(check=lambda: None, each=lambda feeds, call: None, taking=[], all=[])
        self.usher = None
        self.lasts: list[Emission] = []

    def open(self, version: int, newest: Emission) -> Opening:
        return Opening(version, wait_s=8.0, join_s=4.0, joined=("b",))

    def reopen(self, open_: Emission, opening: Opening) -> Opening:
        return replace(opening, wait_s=opening.wait_s + 1.0)

    def last(self, newest: Emission, *, counts: bool) -> None:
        self.lasts.append(newest)

    def finish(self, reason: str) -> None:
        pass


def facade(store: MemoryStore | None = None) -> tuple[TrainerSync, NoEngines]:
    trainer, log = FakeTrainer(trainer_side(TRAINER)[0]), MemoryLog(store or MemoryStore())
    sync = TrainerSync(log, rank=0, world_size=1, trainer=trainer, settings=trainer_settings("t"))
    boundary = sync._boundary = NoEngines()  # type: ignore[assignment]
    sync._open, sync._accepted = Emission(0, 0, 0), True
    return sync, boundary


def test_a_step_behind_one_that_was_skipped_says_what_it_cost_itself() -> None:
    sync, _ = facade()
    sync.begin(1, 1)
    assert (sync.opening.wait_s, sync.opening.joined) == (8.0, ("b",))
    sync.begin(1, 1)
    assert (sync.opening.wait_s, sync.opening.joined) == (9.0, ("b",)), "made and sent again: the same step"
    sync.skip()
    assert sync.opening.wait_s == 9.0, "asked for behind the step"
    sync.begin(1, 2)
    assert sync.opening == Opening(1, wait_s=1.0)
    sync.begin(1, 2)
    assert sync.opening == Opening(1, wait_s=2.0)


def test_engines_are_caught_up_once_behind_the_last_step() -> None:
    sync, boundary = facade()
    for version in (1, 2):
        sync.begin(version, version)
        sync.accept()
        sync.catch_up()
    sync.finished("done")
    assert boundary.lasts == [Emission(1, 0, 1), Emission(2, 0, 2)]
    sync, boundary = facade()
    sync.finished("done")
    assert boundary.lasts == [Emission(0, 0, 0)], "without a call of its own"


def test_an_engine_that_is_lost_behind_the_last_version_still_ends_a_training_that_needs_it() -> None:
    def lost() -> None:
        raise SyncError("the engine is shutting down")

    nothing: Any = SimpleNamespace()
    feeds: Any = SimpleNamespace(check=lost, all=[])
    with pytest.raises(SyncError, match="shutting down"):
        Boundary(nothing, nothing, feeds, trainer_settings("t"), 0, (), None).finish("done")


def no_driver(*args: Any) -> None:
    raise DriverError("cuInit: no device")


def test_a_late_engine_that_a_driver_keeps_from_being_bound_is_told_why() -> None:
    store = MemoryStore()
    journal: Any = SimpleNamespace(books={"i1-2": SimpleNamespace(is_over=False)})
    binder: Any = SimpleNamespace(feed=no_driver)
    Feeds(MemoryLog(store), journal, binder, rank=3, strict=False).join_late(attach_record(1, attachment="i1-2"))
    eventually(lambda: len(store.records) == 1)
    assert store.records == [Failed(attachment="i1-2", side="trainer", rank=3, reason="cuInit: no device")]


def test_an_attach_that_a_driver_breaks_off_ends_with_its_reason_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    sync, _ = facade(store)
    journal: Any = SimpleNamespace(books={"i1": SimpleNamespace(is_over=False)}, incarnation=1, failure="")
    journal.explain, journal.wait = str, lambda check, *rest: [attach_record(1)]
    fakes = {"announce": lambda: journal, "post_attaches": lambda *rest: None, "feed": no_driver}
    for name, fake in fakes.items():
        monkeypatch.setattr(sync._binder, name, fake)
    with pytest.raises(SyncError, match="cuInit: no device"):
        sync.attach()
    assert [record.reason for record in store.records if isinstance(record, Failed)] == ["cuInit: no device"]
