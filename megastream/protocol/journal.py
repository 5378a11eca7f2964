"""A trainer rank's view of the log: the records that concern it, and waiting for what they say, always with an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from megastream.protocol.book import TrainerBook
from megastream.protocol.control import ControlLog
from megastream.protocol.follow import Follower
from megastream.protocol.records import Attach, EngineReady, Failed, Record, TrainerReady
from megastream.protocol.step_records import Opened, TakenBack, UnderWay, Waiting
from megastream.protocol.terms import check_alike

T = TypeVar("T")


class SyncError(RuntimeError):
    """The attachment cannot go on, or a wait reached its deadline. Says who waited for whom, or who failed and why."""


class EnginePoisoned(SyncError):
    """A version did not become live on all engine ranks. The attachment goes on: the next version heals the engine."""


class Journal:
    """Collects who is ready, this incarnation's attachments with their books, and its openings. Only `wait` blocks.

    With `strict` an attachment that fails ends the training; otherwise only what a trainer rank says of itself does,
    a newer incarnation, or a control plane that is lost.
    """

    def __init__(self, log: ControlLog, who: str, incarnation: int, *, strict: bool = True) -> None:
        self._who, self.incarnation, self._strict = who, incarnation, strict
        self.changed = threading.Condition()
        self.num_taken = 0
        self._engines: dict[str, dict[int, EngineReady]] = {}
        self._trainers: dict[int, TrainerReady] = {}
        self._ended = ""
        self._early: Failed | None = None
        self._under_way_s: dict[str, float] = {}
        """When a rank last said that pieces are being acknowledged, by attachment, in monotonic seconds."""
        self.attaches: dict[str, Attach] = {}
        """Of this incarnation, by name, in their order."""
        self.books: dict[str, TrainerBook] = {}
        self.openings: dict[tuple[int, int], Opened] = {}
        """By version and attempt; only those of the newest two versions are kept."""
        self.lasts: list[Opened] = []
        self.waiting: dict[int, list[float]] = {}
        """When ranks came to a version that was not open, in monotonic seconds; from the newest open one on."""
        self.taken_back: dict[tuple[int, int], dict[int, TakenBack]] = {}
        """By version and attempt, then by rank; from the newest opening on."""
        self.on_late: Callable[[Attach], None] = lambda attach: None
        """Called in the thread that reads the log when an engine attaches while training goes on."""
        self._follower = Follower(
            log, who.replace(" ", "-"), take=self._take, refused=self._on_refused, lost=self._on_lost
        )

    def start(self) -> None:
        self._follower.start()

    def stop(self) -> None:
        self._follower.stop()

    def name(self, number: int) -> str:
        """The name of this incarnation's attachment `number`, from 0; that of the first is known from its start."""
        return f"i{self.incarnation}" if number == 0 else f"i{self.incarnation}-{number + 1}"

    def first_attaches(self, count: int) -> list[Attach] | None:
        """The attachments that rank 0 asked for at the start, once all of them are there."""
        return list(self.attaches.values())[:count] if len(self.attaches) >= count else None

    def last(self, number: int) -> Opened | None:
        """The word of rank 0 at the end of training; `number` counts the calls."""
        return self.lasts[number] if len(self.lasts) > number else None

    def ready_engines(self, name: str, count: int) -> list[str] | None:
        """Engines whose ranks are all up, the last `count` that came, oldest first; or the one that is named."""
        ready = [engine for engine, ranks in self._engines.items() if name in ("", engine) and self._is_up(ranks)]
        return ready[-count:] if len(ready) >= count else None

    def free_engines(self, name: str) -> list[str]:
        """Engines that may attach now: all ranks are up, and none of ours holds it or could not be attached to it."""
        held = {attach.engine for attach in self.attaches.values() if not self._is_free(self.books[attach.attachment])}
        ready = [engine for engine, ranks in self._engines.items() if name in ("", engine) and self._is_up(ranks)]
        return [engine for engine in ready if engine not in held]

    def missing_trainers(self, world_size: int) -> list[str]:
        return [f"trainer rank {rank}" for rank in range(world_size) if rank not in self._trainers]

    def check_alike(self, engine: str) -> None:
        """ProtocolError when ranks of an engine or of this trainer have other releases than they can have together."""
        with self.changed:
            check_alike("trainer", self._trainers.values())
            check_alike(f"engine {engine}", self._engines[engine].values())

    def engine_world_size(self, engine: str) -> int:
        return next(iter(self._engines[engine].values())).world_size

    @property
    def failure(self) -> str:
        """Why no wait can succeed any more; empty while all is well."""
        if self._early is not None:
            return describe_failed(self._early)
        if self._strict:
            failed = [book.failed for book in self.books.values() if book.failed is not None]
            if failed:
                return describe_failed(failed[0])
        return self._ended

    def explain(self, reason: str) -> str:
        """Why this rank cannot go on, behind who failed first where that says something else."""
        first = self.failure
        if not first or first in reason:
            return reason
        return first if reason in first else f"{first} ({reason})"

    def failure_within(self, seconds: float, book: TrainerBook) -> str:
        """Why an attachment ended, waiting so long for a word: lanes break faster than records come."""

        def found() -> str:
            return describe_failed(book.failed) if book.failed is not None else self.failure

        with self.changed:
            self.changed.wait_for(found, seconds)
            return found()

    def wait(
        self,
        check: Callable[[], T | None],
        deadline_s: float,
        missing: Callable[[], str],
        book: TrainerBook | None = None,
    ) -> T:
        """What `check` gives as soon as it is neither None nor False. It runs under the lock, after every record.

        SyncError when the training fails first (or the attachment of `book`), or after `deadline_s`; then it names
        what is `missing`. That time begins anew when a rank says that its pieces (of `book`) are still acknowledged.
        """
        begin = time.monotonic()
        with self.changed:
            while True:
                found = check()
                if found is not None and found is not False:
                    return found
                if self.failure:
                    raise SyncError(self.failure)
                if book is not None and book.failed is not None:
                    raise SyncError(describe_failed(book.failed))
                deadline = max(begin, self._moved_s(book)) + deadline_s
                if not self.changed.wait(deadline - time.monotonic()):
                    raise SyncError(f"{self._who} waited {deadline_s:g} s for {missing()}")

    def _moved_s(self, book: TrainerBook | None) -> float:
        if book is not None:
            return self._under_way_s.get(book.attachment, 0.0)
        return max(self._under_way_s.values(), default=0.0)

    def end(self, reason: str) -> None:
        """Nothing can succeed from now on. The first reason counts."""
        with self.changed:
            self._ended = self._ended or reason
            self.changed.notify_all()

    def _take(self, record: Record) -> None:
        with self.changed:
            self.num_taken += 1
            match record:
                case EngineReady():
                    self._engines.setdefault(record.engine, {})[record.rank] = record
                case TrainerReady() if record.incarnation == self.incarnation:
                    self._trainers[record.rank] = record
                case Attach() if record.incarnation == self.incarnation:
                    self._take_attach(record)
                case Attach() if record.incarnation > self.incarnation and record.over < 0:
                    self._ended = self._ended or f"superseded by incarnation {record.incarnation}"
                case Opened() if record.incarnation == self.incarnation:
                    self._take_opened(record)
                case Waiting() | TakenBack() | UnderWay() if record.incarnation == self.incarnation:
                    self._take_word(record)
                case Failed() if record.incarnation == self.incarnation or self._is_early(record):
                    self._early = self._early or record
                case _:
                    for book in self.books.values():
                        book.take(record)
            self.changed.notify_all()

    def _take_attach(self, record: Attach) -> None:
        ranks = self.engine_world_size(record.engine)
        self.attaches[record.attachment] = record
        self.books[record.attachment] = TrainerBook(record.attachment, record.engine, record.trainer_world_size, ranks)
        if record.late_joiner:
            self.on_late(record)

    def _take_word(self, record: Waiting | TakenBack | UnderWay) -> None:
        """What a rank says of its step."""
        match record:
            case Waiting():
                self.waiting.setdefault(record.version, []).append(time.monotonic())
            case TakenBack():
                self.taken_back.setdefault((record.version, record.attempt), {})[record.rank] = record
            case UnderWay():
                self._under_way_s[record.attachment] = time.monotonic()

    def _take_opened(self, record: Opened) -> None:
        if record.last:
            self.lasts.append(record)
            return
        key = record.version, record.attempt
        self.openings[key] = record
        self.openings = {of: opened for of, opened in self.openings.items() if of[0] >= record.version - 1}
        self.taken_back = {of: ranks for of, ranks in self.taken_back.items() if of >= key}
        self.waiting = {version: since for version, since in self.waiting.items() if version >= record.version}

    def _is_early(self, record: Failed) -> bool:
        """Somebody failed before there was an Attach to fail."""
        return not self.attaches and record.attachment == self.name(0)

    @staticmethod
    def _is_up(ranks: dict[int, EngineReady]) -> bool:
        return len(ranks) == next(iter(ranks.values())).world_size

    @staticmethod
    def _is_free(book: TrainerBook) -> bool:
        """The engine has answered the end of an attachment that it had taken: it is as it was, with some version."""
        return book.attached is not None and book.detached is not None

    def _on_refused(self, record: Record | None, reason: str) -> None:
        self.end(f"{self._who} {reason}")

    def _on_lost(self, reason: str) -> None:
        self.end(reason)


def describe_failed(failed: Failed) -> str:
    rank = f" rank {failed.rank}" if failed.rank >= 0 else ""
    return f"{failed.side}{rank} failed: {failed.reason}"
