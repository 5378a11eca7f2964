"""What trainer rank 0 says to all ranks, and when: against a log in memory, without lanes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megastream.protocol.journal import Journal
from megastream.protocol.records import Attach, Attached, EngineReady, Record, WeightsReady
from megastream.protocol.step_records import Opened, TakenBack, Waiting
from megastream.sync import usher
from megastream.sync.binding import Binder
from megastream.sync.usher import Usher
from tests.helpers.fake_trainer import FakeTrainer
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import attach_record
from tests.helpers.spine import TRAINER, eventually, trainer_settings
from tests.helpers.synthetic import trainer_side


class Bench:
    def __init__(self, ranks: int = 1, **settings: Any) -> None:
        self.store, self.failed = MemoryStore(), []
        self.log = MemoryLog(self.store)
        self.journal = Journal(self.log, "trainer rank 0", 1, strict=False)
        made = trainer_settings("t", **settings)
        trainer = FakeTrainer(trainer_side(TRAINER)[0])
        binder = Binder(self.log, trainer, made, rank=0, world_size=ranks)
        self.usher = Usher(self.log, self.journal, binder, made, self.failed.append)

    def of(self, kind: type) -> list[Any]:
        return [record for record in self.store.records if isinstance(record, kind)]

    def engine(self, name: str) -> None:
        self.log.append(EngineReady(engine=name, rank=0, world_size=1, library=""))

    def attached(self, name: str, engine: str) -> None:
        """An engine that has version 0."""
        self.engine(engine)
        self.log.append(attach_record(1, attachment=name, engine=engine))
        self.whole(name, 0)
        self.log.append(Attached(attachment=name, engine=engine, version=0, replaced=False))
        eventually(lambda: name in self.journal.books and self.journal.books[name].attached is not None)

    def whole(self, name: str, version: int) -> None:
        rest = dict(incarnation=1, attempt=0, train_step=0, plan_digest="d", units=(), elements=1)
        self.log.append(WeightsReady(attachment=name, version=version, **rest))

    def waits(self, version: int) -> None:
        self.log.append(Waiting(incarnation=1, version=version, rank=3))

    def opened(self) -> list[tuple[int, tuple[str, ...]]]:
        return [(record.version, record.takes) for record in self.of(Opened)]


@contextmanager
def bench(**settings: Any) -> Iterator[Bench]:
    made = Bench(**settings)
    made.journal.start()
    made.usher.start()
    try:
        yield made
    finally:
        made.usher.stop()
        made.journal.stop()


def test_a_version_is_opened_as_soon_as_the_one_before_has_settled() -> None:
    with bench() as b:
        b.attached("i1", "a")
        b.usher.note_sent("i1", 1, 0)
        b.usher.open_after(1, 1)
        b.whole("i1", 1)
        eventually(lambda: b.opened() == [(2, ("i1",))])


def test_a_slow_engine_has_until_somebody_waits_for_it_and_then_its_time() -> None:
    with bench(lag_s=0.3) as b:
        b.attached("i1", "a")
        b.attached("i1-2", "b")
        for name in ("i1", "i1-2"):
            b.usher.note_sent(name, 1, 0)
        b.usher.open_after(1, 1)
        b.whole("i1", 1)
        eventually(lambda: b.journal.books["i1"].settled == (1, 0))
        assert b.opened() == [], "the step that needs it is not there yet"
        b.waits(2)
        eventually(lambda: b.opened() == [(2, ("i1",))])


def test_the_next_attempt_is_opened_when_every_rank_has_taken_the_one_before_back() -> None:
    def takes_back(rank: int, lagging: tuple[str, ...], attempt: int = 0) -> None:
        b.log.append(TakenBack(incarnation=1, version=2, attempt=attempt, rank=rank, lagging=lagging))

    def attempts() -> list[tuple[int, tuple[str, ...]]]:
        return [(record.attempt, record.takes) for record in b.of(Opened)]

    with bench(ranks=2) as b:
        for name in ("i1", "i1-2"):
            b.attached(name, f"engine of {name}")
        b.usher.open_after(1, 1)
        eventually(lambda: attempts() == [(0, ("i1", "i1-2"))])
        takes_back(1, ("i1-2",))
        eventually(lambda: len(b.journal.taken_back.get((2, 0), {})) == 1)
        assert len(attempts()) == 1, "rank 0 may have bytes of it on its way"
        takes_back(0, ())
        eventually(lambda: attempts()[1:] == [(1, ("i1",))])
        for rank in (0, 1):
            takes_back(rank, (), attempt=1)
        eventually(lambda: attempts()[2:] == [(2, ("i1",))])


def test_whoever_asks_for_what_is_open_gets_it_again() -> None:
    """As after a server has lost its data; nobody asks otherwise."""
    with bench() as b:
        b.usher.open_after(1, 1)
        eventually(lambda: b.opened() == [(2, ())])
        b.waits(2)
        eventually(lambda: b.opened() == [(2, ())] * 2)


def test_an_engine_that_comes_up_is_asked_once_and_only_where_engines_may_come_late() -> None:
    for late in (True, False):
        with bench(late_joiners=late) as b:
            b.attached("i1", "a")
            b.usher.open_after(7, 70)
            b.engine("b")
            if late:
                eventually(lambda b=b: any(record.engine == "b" for record in b.of(Attach)))  # type: ignore[misc]
            b.waits(8)
            eventually(lambda b=b: (8, ("i1",)) in b.opened())  # type: ignore[misc]
            asked = [record for record in b.of(Attach) if record.engine == "b"]
            assert [(r.attachment, r.base_version, r.train_step) for r in asked] == [("i1-2", 7, 70)] * late
            assert all(record.late_joiner for record in asked)


def test_an_engine_that_the_server_has_not_seen_lately_is_not_asked() -> None:
    with bench(late_joiners=True) as b:
        b.store.silent_s = 30.0
        b.attached("i1", "a")
        b.usher.open_after(7, 7)
        b.engine("b")
        eventually(lambda: "b" in b.journal.free_engines(""))
        b.usher._looked_s = 0.0
        b.usher._invite()
        assert len(b.of(Attach)) == 1
        b.store.silent_s = 1.0
        eventually(lambda: len(b.of(Attach)) == 2)


def test_a_training_without_engines_ends_at_its_deadline() -> None:
    with bench(late_joiners=True, alone_s=0.2) as b:
        b.usher.open_after(7, 7)
        eventually(lambda: b.failed != [])
        assert b.failed == ["no engine was attached for 0.2 s; training stops behind version 7"]


def test_an_engine_is_asked_again_when_the_server_has_lost_the_invitation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may come back empty before anybody has read it."""

    def losing(record: Record) -> str:
        if isinstance(record, Attach) and not lost:
            lost.append(record)
            return "0"
        return honest(record)

    monkeypatch.setattr(usher, "_INVITE_EVERY_S", 0.05)
    with bench(late_joiners=True, bind_s=0.5) as b:
        b.attached("i1", "a")
        honest, lost = b.log.append, []
        b.log.append = losing  # type: ignore[method-assign]
        b.engine("b")
        b.usher.open_after(7, 70)
        eventually(lambda: "i1-3" in b.journal.attaches)
        assert lost[0].attachment == "i1-2", "a name is not used twice: somebody may have read the first one"
        assert b.journal.attaches["i1-3"].engine == lost[0].engine == "b" and len(b.of(Attach)) == 2
