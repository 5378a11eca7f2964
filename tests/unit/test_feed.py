"""What one attachment costs a step, and what is kept of it: nothing grows with the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megastream.protocol.book import TrainerBook
from megastream.protocol.records import Committed
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
