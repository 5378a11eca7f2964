"""Who takes the next version: the rules, one by one, on books that records have filled."""

from __future__ import annotations

from typing import Any

from megastream.protocol.book import TrainerBook
from megastream.protocol.records import Attached, Detached, Emitted, Failed, WeightsReady
from megastream.protocol.roster import Roster
from megastream.protocol.step_records import Connected, Withdrawn
from tests.helpers.plans import small_plan

RANKS = 2


def version_of(name: str, version: int) -> dict[str, Any]:
    return dict(attachment=name, incarnation=1, version=version, attempt=0)


class Books:
    """Two trainer ranks; engines by attachment."""

    def __init__(self, *attached: str) -> None:
        self.books: dict[str, TrainerBook] = {}
        self.roster = Roster(1, self.books)
        for name in attached:
            self.comes(name)
            self.sends(name, 0)
            self.whole(name, 0)
            self.take(name, Attached(attachment=name, engine=name, version=0, replaced=False))

    def take(self, name: str, record: Any) -> None:
        self.books[name].take(record)

    def comes(self, name: str) -> None:
        self.books[name] = TrainerBook(name, f"engine of {name}", RANKS, 1)

    def connects(self, name: str) -> None:
        for rank in range(RANKS):
            self.take(name, Connected(attachment=name, rank=rank))

    def sends(self, name: str, version: int, attempt: int = 0) -> None:
        self.roster.note_sent(name, version, attempt)

    def whole(self, name: str, version: int, attempt: int = 0) -> None:
        manifest = dict(train_step=0, plan_digest="d", units=(), elements=1)
        self.take(name, WeightsReady(**{**version_of(name, version), "attempt": attempt}, **manifest))

    def opens(self, version: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        opened = self.roster.open(version)
        assert opened.version == version and not opened.last
        return opened.takes, opened.joins


def test_who_has_a_piece_of_what_was_taken_back_skips_the_version_and_gets_it_behind_the_last_step() -> None:
    books = Books("i1", "i1-2")
    first = books.roster.open(1)
    second = books.roster.reopen(first, {"i1-2"})
    assert (second.version, second.attempt, second.takes) == (1, 1, ("i1",))
    books.sends("i1", 1, attempt=1)
    books.whole("i1", 1, attempt=1)
    assert books.roster.unsettled() == ["i1-2"] and books.roster.worth_waiting_for() == []
    assert books.opens(2) == (("i1",), ())
    books.take("i1-2", Withdrawn(**version_of("i1-2", 1)))
    assert books.roster.unsettled() == []
    assert books.roster.last(1).joins == ("i1-2",), "it was never told that version 1 counts"
    books.sends("i1-2", 1, attempt=2)
    assert books.roster.unsettled() == ["i1-2"], "the attempt before has settled, this one has not"
    books.whole("i1-2", 1, attempt=2)
    assert books.roster.unsettled() == [] and books.roster.last(1).joins == ()


def test_who_was_lost_while_an_attempt_was_taken_back_gets_no_other() -> None:
    books = Books("i1", "i1-2")
    first = books.roster.open(1)
    books.take("i1", Failed(attachment="i1", side="engine", rank=0, reason="gone"))
    assert books.roster.reopen(first, set()).takes == ("i1-2",)


def test_who_is_done_takes_the_next_version_and_who_is_not_skips_it() -> None:
    books = Books("i1", "i1-2")
    assert books.opens(1) == (("i1", "i1-2"), ())
    for name in ("i1", "i1-2"):
        books.sends(name, 1)
    books.whole("i1", 1)
    assert books.roster.unsettled() == ["i1-2"]
    assert books.opens(2) == (("i1",), ())
    books.sends("i1", 2)
    books.whole("i1-2", 1)
    books.whole("i1", 2)
    assert books.opens(3) == (("i1", "i1-2"), ()), "it takes the next one, never the one between"


def test_a_lagging_engine_is_waited_for_once() -> None:
    books = Books("i1")
    books.sends("i1", 1)
    assert books.roster.worth_waiting_for() == ["i1"]
    assert books.opens(2) == ((), ())
    assert books.roster.worth_waiting_for() == [] and books.roster.unsettled() == ["i1"]
    books.whole("i1", 1)
    assert books.opens(3) == (("i1",), ())
    books.sends("i1", 3)
    assert books.roster.worth_waiting_for() == ["i1"], "it kept up again: it is waited for again"


def test_a_version_that_was_withdrawn_is_settled() -> None:
    books = Books("i1")
    books.sends("i1", 1)
    books.take("i1", Withdrawn(**version_of("i1", 1)))
    assert books.opens(2) == (("i1",), ())
    assert books.books["i1"].whole_version == 0


def test_an_engine_that_comes_late_joins_when_every_rank_is_connected_and_takes_nothing_before_it_is_attached() -> None:
    books = Books("i1")
    books.comes("i1-2")
    books.take("i1-2", Connected(attachment="i1-2", rank=0))
    assert books.opens(1) == (("i1",), ())
    books.connects("i1-2")
    assert books.opens(2) == (("i1",), ("i1-2",))
    books.sends("i1-2", 1)
    assert books.opens(3) == (("i1",), ()), "its first version is still on its way"
    books.whole("i1-2", 1)
    assert books.opens(4) == (("i1",), ()), "it compares"
    books.take("i1-2", Attached(attachment="i1-2", engine="e2", version=1, replaced=True))
    assert books.opens(5) == (("i1", "i1-2"), ())


def test_a_first_version_that_was_withdrawn_is_followed_by_a_newer_one() -> None:
    books = Books()
    books.comes("i1")
    books.connects("i1")
    assert books.opens(5) == ((), ("i1",))
    books.sends("i1", 4)
    books.take("i1", Withdrawn(**version_of("i1", 4)))
    assert books.opens(6) == ((), ("i1",))


def test_what_has_ended_is_passed_over() -> None:
    books = Books("i1", "i1-2")
    books.take("i1", Failed(attachment="i1", side="engine", rank=0, reason="gone"))
    books.take("i1-2", Detached(attachment="i1-2", engine="e"))
    assert books.opens(1) == ((), ()) and books.roster.engines() == []


def test_behind_the_last_step_only_those_get_it_that_were_never_sent_it() -> None:
    books = Books("i1", "i1-2", "i1-3")
    for name in ("i1", "i1-3"):
        books.sends(name, 4)
    books.whole("i1", 4)
    books.take("i1-3", Withdrawn(**version_of("i1-3", 4)))
    books.comes("i1-4")
    books.connects("i1-4")
    books.comes("i1-5")
    last = books.roster.last(4)
    assert last.last and last.joins == ("i1-2", "i1-4"), "an attempt that was withdrawn is not made twice"


def test_a_rank_that_took_a_version_back_makes_it_withdrawn_for_all() -> None:
    book = TrainerBook("i1", "e", RANKS, 2)
    for rank, (pieces, withdrawn) in enumerate([(4, False), (1, True)]):
        sizes = dict(pieces=pieces, elements=6, payload_bytes=12, wire_bytes=0, wait_s=0.0)
        book.take(Emitted(**version_of("i1", 1), rank=rank, withdrawn=withdrawn, **sizes))
    assert book.manifest(small_plan(), 1, 1, 0, train_step=1) == Withdrawn(**version_of("i1", 1))
