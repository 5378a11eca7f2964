"""The two threads on the control plane outlast what records contain and a server that is away for long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from megastream.protocol.follow import Follower, Outbox
from megastream.protocol.journal import Journal
from megastream.protocol.records import Attached, Detached, EngineReady, Failed, Record
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import attach_record
from tests.helpers.spine import eventually


def record(name: str) -> Detached:
    return Detached(attachment=name, engine="e")


class Watch:
    """A follower that notes what it is told; records named `bad` cannot be used."""

    def __init__(self, log: MemoryLog, retry_s: float | None) -> None:
        self.taken: list[str] = []
        self.refused: list[str] = []
        self.lost: list[str] = []
        self.ticks = 0
        self.follower = Follower(
            log,
            "watch",
            take=self.take,
            refused=lambda record, reason: self.refused.append(reason),
            tick=self.tick,
            lost=self.lost.append,
            poll_s=0.02,
            retry_s=retry_s,
        )
        self.follower.start()

    def take(self, record: Record) -> None:
        assert isinstance(record, Detached)
        if record.attachment == "bad":
            raise OverflowError("too large")
        self.taken.append(record.attachment)

    def tick(self) -> None:
        self.ticks += 1


def test_a_record_that_cannot_be_used_is_reported_and_the_next_one_is_taken() -> None:
    store = MemoryStore()
    watch = Watch(MemoryLog(store), retry_s=0.05)
    for name in ("a", "bad", "b"):
        MemoryLog(store).append(record(name))
    eventually(lambda: watch.taken == ["a", "b"])
    assert watch.refused == ["cannot use a record Detached: OverflowError: too large"] and watch.lost == []
    watch.follower.stop()


@pytest.mark.parametrize("error", [None, UnicodeDecodeError("utf8", b"", 0, 1, "entry")])
def test_an_engine_tries_a_lost_log_for_ever_and_says_so_once(
    error: ValueError | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    store = MemoryStore()
    log = MemoryLog(store)
    if error is not None:
        monkeypatch.setattr(log, "_check", raises_while_away(store, error))
    watch = Watch(log, retry_s=0.05)
    eventually(lambda: watch.ticks > 0)
    store.away = True
    eventually(lambda: bool(watch.lost))
    ticks = watch.ticks
    eventually(lambda: watch.ticks > ticks + 5)
    store.away = False
    log.append(record("after"))
    eventually(lambda: watch.taken == ["after"])
    assert len(watch.lost) == 1
    assert [line.split(" after")[0] for line in caplog.messages if "control plane" in line and "watch" in line] == [
        f"watch has lost the control plane and no trainer can attach; what is live keeps serving; tried again every "
        f"0.05 s: {watch.lost[0]}",
        "watch has the control plane back",
    ]
    watch.follower.stop()


def raises_while_away(store: MemoryStore, error: Exception) -> Callable[[], None]:
    def check() -> None:
        if store.away:
            raise error

    return check


def test_a_trainer_gives_a_lost_log_up() -> None:
    store = MemoryStore()
    watch = Watch(MemoryLog(store), retry_s=None)
    store.away = True
    eventually(lambda: watch.lost == ["the server in memory is away"])
    watch.follower._thread.join(5)
    assert not watch.follower._thread.is_alive()


def test_what_could_not_be_posted_is_posted_later_in_order(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    outbox = Outbox(MemoryLog(store), "box", retry_s=0.05)
    outbox.start()
    store.away = True
    for name in ("a", "b", "c"):
        outbox.post(record(name))
    eventually(lambda: "box keeps its Detached" in caplog.text)
    store.away = False
    eventually(lambda: [r.attachment for r in store.records if isinstance(r, Detached)] == ["a", "b", "c"])
    assert caplog.text.count("box keeps its Detached") == 1
    store.away = True
    outbox.post(record("d"))
    outbox.close(5)
    assert not outbox._thread.is_alive() and "its Detached was never posted" in caplog.text


def test_a_record_that_cannot_be_posted_does_not_hold_up_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    store, log = MemoryStore(), MemoryLog(MemoryStore())
    real = MemoryLog(store).append

    def append(item: Record) -> str:
        if isinstance(item, Failed):
            raise UnicodeEncodeError("utf8", "\ud800", 0, 1, "surrogates")
        return real(item)

    monkeypatch.setattr(log, "append", append)
    outbox = Outbox(log, "box", retry_s=0.05)
    outbox.start()
    outbox.post(Failed(attachment="a", side="engine", rank=0, reason="?"))
    outbox.post(record("b"))
    eventually(lambda: len(store.records) == 1)
    outbox.close(5)


def test_a_trainer_rank_names_who_failed_first_and_repeats_nothing() -> None:
    journal = Journal(MemoryLog(MemoryStore()), "trainer rank 1", 1)
    assert journal.explain("w reaches element 9") == "w reaches element 9"
    journal._take(EngineReady(engine="e", rank=0, world_size=1, library=""))
    journal._take(attach_record(1))
    journal._take(Failed(attachment="i1", side="trainer", rank=0, reason="w reaches element 9"))
    first = "trainer rank 0 failed: w reaches element 9"
    assert journal.explain("w reaches element 9") == first
    assert journal.explain(first) == first
    assert journal.explain("the lane broke") == f"{first} (the lane broke)"


def test_a_rank_that_fails_before_it_attaches_ends_the_others() -> None:
    store = MemoryStore()
    journal = Journal(MemoryLog(store), "trainer rank 1", 1)
    journal.start()
    timer = threading.Timer(
        0.1, lambda: MemoryLog(store).append(Failed(attachment="i1", side="trainer", rank=0, reason="no engine"))
    )
    timer.start()
    with pytest.raises(RuntimeError, match="trainer rank 0 failed: no engine"):
        journal.wait(lambda: journal.first_attaches(1), 10, lambda: "trainer rank 0 to attach")
    journal.stop()


def attached(journal: Journal, number: int, engine: str, **changes: Any) -> str:
    name = journal.name(number)
    journal._take(EngineReady(engine=engine, rank=0, world_size=1, library=""))
    journal._take(attach_record(journal.incarnation, attachment=name, engine=engine, **changes))
    return name


def test_which_engines_may_be_asked_to_attach() -> None:
    journal = Journal(MemoryLog(MemoryStore()), "trainer rank 0", 3, strict=False)
    first = attached(journal, 0, "a")
    assert first == "i3" and journal.free_engines("") == []
    second = attached(journal, 1, "b")
    journal._take(EngineReady(engine="c", rank=1, world_size=2, library=""))
    assert second == "i3-2" and journal.free_engines("") == [], "of c one rank is missing"
    journal._take(EngineReady(engine="c", rank=0, world_size=2, library=""))
    assert journal.free_engines("") == ["c"] and journal.free_engines("b") == []
    journal._take(Failed(attachment=second, side="engine", rank=0, reason="cannot bind"))
    journal._take(Detached(attachment=second, engine="b"))
    assert journal.free_engines("") == ["c"], "b could not be attached: it is not asked again"
    journal._take(Attached(attachment=first, engine="a", version=0, replaced=False))
    journal._take(Failed(attachment=first, side="trainer", rank=1, reason="its lane broke"))
    assert journal.free_engines("") == ["c"], "a has not said that it is free"
    journal._take(Detached(attachment=first, engine="a"))
    assert journal.free_engines("") == ["a", "c"]
    attached(journal, 2, "a")
    assert journal.free_engines("") == ["c"]


def test_an_engine_that_is_lost_ends_the_training_only_where_all_are_needed() -> None:
    journals = [Journal(MemoryLog(MemoryStore()), "trainer rank 1", 1, strict=strict) for strict in (True, False)]
    for journal in journals:
        name = attached(journal, 0, "a")
        journal._take(Failed(attachment=name, side="engine", rank=0, reason="gone"))
    assert [journal.failure for journal in journals] == ["engine rank 0 failed: gone", ""]
    journals[1]._take(Failed(attachment=name, side="trainer", rank=2, reason="killed", incarnation=1))
    assert journals[1].failure == "trainer rank 2 failed: killed"


def test_a_newer_incarnation_ends_an_older_one() -> None:
    journal = Journal(MemoryLog(MemoryStore()), "trainer rank 1", 1, strict=False)
    journal._take(attach_record(2))
    assert journal.failure == "superseded by incarnation 2"
