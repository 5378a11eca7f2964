"""The two threads on the control plane outlast what records contain and a server that is away for long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from megastream.protocol.follow import Follower, Outbox
from megastream.protocol.journal import Journal
from megastream.protocol.records import Detached, EngineReady, Failed, Record
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
        journal.wait(lambda: journal.attach, 10, lambda: "trainer rank 0 to attach")
    journal.stop()
