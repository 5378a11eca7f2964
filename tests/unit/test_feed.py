"""What one attachment costs a step, and what is kept of it: nothing grows with the run."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megastream.protocol import journal as protocol_journal
from megastream.protocol.book import TrainerBook
from megastream.protocol.journal import Journal, SyncError
from megastream.protocol.records import Committed, Emitted, WeightsReady
from megastream.protocol.step_records import UnderWay, Waiting, Withdrawn
from megastream.rl import streaming
from megastream.rl.streaming import Streaming
from megastream.sync import Opening
from megastream.sync.feed import Feed
from megastream.trainer.outgoing import EmitReport
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import attach_record, small_plan
from tests.helpers.spine import trainer_settings


def report(version: int, wait_s: float) -> EmitReport:
    return EmitReport(version, 0, pieces=1, payload_bytes=4, wire_bytes=8, elements=1, wait_s=wait_s)


def feed() -> Feed:
    nothing: Any = SimpleNamespace()
    return Feed(MemoryLog(MemoryStore()), nothing, attach_record(1), small_plan(), nothing, trainer_settings("t"), 0)


def test_a_wait_for_slots_is_counted_once() -> None:
    one = feed()
    for version, wait_s in enumerate((0.5, 0.25)):
        one._emitted(report(version, wait_s))
    assert one.take_slot_wait_s() == 0.75
    assert one.take_slot_wait_s() == 0.0, "an engine that skips versions reports nothing new"


def test_only_the_newest_reports_and_commits_are_kept() -> None:
    one, book = feed(), TrainerBook("i1", "e", 1, 1)
    for version in range(200):
        one._emitted(report(version, 0.0))
        book.take(Committed(attachment="i1", incarnation=1, version=version, ranks=(), visible_unix_s=0.0))
    assert [kept.version for kept in one.reports] == list(range(184, 200))
    assert len(book.committed) == 16 and book.live_version == 199
    assert (newer := book.committed_at(7)) is not None and newer.version >= 7


def test_a_step_says_what_engines_cost_on_the_rank_where_it_was_most(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [
        Opening(3, wait_s=0.25, join_s=0.125, slot_wait_s=0.0, takes=("a",), skipped=("b",), withdrawn=("b",)),
        Opening(3, wait_s=0.5, join_s=0.0, slot_wait_s=0.75, takes=("a",), skipped=("b",), withdrawn=()),
    ]
    monkeypatch.setattr(streaming, "gather", lambda mine: [mine, ranks[1]])
    nothing: Any = SimpleNamespace()
    one = Streaming(nothing, nothing, "launch")
    assert one.cost() == {}
    one._sync = SimpleNamespace(opening=ranks[0])  # type: ignore[assignment]
    assert one.cost() == {
        "opening_ms": 500.0,
        "join_ms": 125.0,
        "slot_wait_ms": 750.0,
        "takes": ["a"],
        "joined": [],
        "skipped": ["b"],
        "withdrawn": ["b"],
    }


def test_what_ranks_emitted_is_kept_until_the_version_has_settled() -> None:
    """On every rank: only rank 0 asks for manifests, and the records of all ranks come to all of them."""
    book = TrainerBook("i1", "e", trainer_ranks=2, engine_ranks=1)
    for version in range(100):
        named = dict(attachment="i1", incarnation=1, version=version)
        sizes = dict(pieces=1, payload_bytes=4, wire_bytes=8, elements=1, wait_s=0.0)
        for attempt in (0, 1):
            for rank in (0, 1):
                assert book.not_emitted(version, attempt)[0] == f"trainer rank {rank}"
                book.take(Emitted(**named, **sizes, attempt=attempt, rank=rank))
            assert book.not_emitted(version, attempt) == []
        if version % 2:
            book.take(Withdrawn(**named, attempt=1))
        else:
            book.take(WeightsReady(**named, attempt=1, train_step=0, plan_digest="d", units=(), elements=1))
        assert book.emitted == {}
        book.take(Emitted(**named, **sizes, attempt=1, rank=0))
        assert book.emitted == {}, "said twice, after a server had lost its data"


@pytest.mark.parametrize(
    ("words_of", "about_one", "is_given_time"), [("i1", True, True), ("i1", False, True), ("i1-2", True, False)]
)
def test_ranks_wait_for_one_whose_pieces_are_still_acknowledged(
    words_of: str, about_one: bool, is_given_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait of 100 s that hears at 60 s of what is under way, and ends well behind 120 s. Clocks are the test's."""
    now, looked, over = [0.0], threading.Event(), threading.Event()
    monkeypatch.setattr(protocol_journal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one, book = Journal(MemoryLog(MemoryStore()), "trainer rank 1", 1), TrainerBook("i1", "e", 1, 1)

    def others() -> None:
        now[0] = 60.0
        one._take(UnderWay(attachment=words_of, incarnation=1, version=3, attempt=0, rank=0))
        now[0] = 120.0
        one._take(Waiting(incarnation=1, version=9, rank=0))
        looked.wait(10)
        over.set()
        one._take(Waiting(incarnation=1, version=9, rank=0))

    def check() -> bool:
        if not thread.ident:
            thread.start()
        if now[0] == 120.0:
            looked.set()
        return over.is_set()

    thread = threading.Thread(target=others)
    given_up = nullcontext() if is_given_time else pytest.raises(SyncError, match="rank 1 waited 100 s for version 3")
    with given_up:
        one.wait(check, 100.0, lambda: "version 3", book if about_one else None)
    thread.join(10)


def test_a_rank_says_that_pieces_are_acknowledged_while_it_waits_for_all_of_them() -> None:
    class Emitter:
        def drain(self, deadline_s: float, every_s: float, still: Any) -> EmitReport:
            asked.append((deadline_s, every_s))
            still()
            return report(3, 0.0)

    asked: list[tuple[float, float]] = []
    one = feed()
    one._emitter, one._rank = Emitter(), 1  # type: ignore[assignment]
    one._settings = trainer_settings("t", transfer_s=9.0, detach_s=2.0)
    one.finish(3, 0, 3)
    one.join()
    store = one._log._store  # type: ignore[attr-defined]
    assert asked == [(9.0, 1.0)], "often enough for the rank that waits least"
    assert [type(record) for record in store.records] == [UnderWay, Emitted]
    assert store.records[0] == UnderWay(attachment="i1", incarnation=1, version=3, attempt=0, rank=1)
