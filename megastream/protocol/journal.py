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

T = TypeVar("T")


class SyncError(RuntimeError):
    """The attachment cannot go on, or a wait reached its deadline. Says who waited for whom, or who failed and why."""


class EnginePoisoned(SyncError):
    """A version did not become live on all engine ranks. The attachment goes on: the next version heals the engine."""


class Journal:
    """Collects who is ready, this incarnation's Attach, and its book. Only `wait` blocks."""

    def __init__(self, log: ControlLog, who: str, incarnation: int) -> None:
        self._who, self.incarnation = who, incarnation
        self._changed = threading.Condition()
        self._engines: dict[str, dict[int, EngineReady]] = {}
        self._trainers: set[int] = set()
        self._lost = ""
        self._early: Failed | None = None
        self.attach: Attach | None = None
        self.book: TrainerBook | None = None
        self._follower = Follower(
            log, who.replace(" ", "-"), take=self._take, refused=self._on_refused, lost=self._on_lost
        )

    def start(self) -> None:
        self._follower.start()

    def stop(self) -> None:
        self._follower.stop()

    @property
    def attachment(self) -> str:
        """The name of this incarnation's attachment, known before anybody attaches."""
        return f"i{self.incarnation}"

    def ready_engine(self, name: str) -> tuple[str, int] | None:
        """(engine, number of ranks) of an engine whose ranks are all up: `name`, or the one that came up last."""
        for engine, ranks in reversed(self._engines.items()):
            world_size = next(iter(ranks.values())).world_size
            if name in ("", engine) and len(ranks) == world_size:
                return engine, world_size
        return None

    def missing_trainers(self, world_size: int) -> list[str]:
        return [f"trainer rank {rank}" for rank in range(world_size) if rank not in self._trainers]

    def engine_world_size(self, engine: str) -> int:
        return next(iter(self._engines[engine].values())).world_size

    @property
    def failure(self) -> str:
        """Why no wait can succeed any more; empty while all is well."""
        failed = self._early or (self.book.failed if self.book is not None else None)
        if failed is not None:
            rank = f" rank {failed.rank}" if failed.rank >= 0 else ""
            return f"{failed.side}{rank} failed: {failed.reason}"
        return self._lost

    def explain(self, reason: str) -> str:
        """Why this rank cannot go on, behind who failed first where that says something else."""
        first = self.failure
        if not first or first in reason:
            return reason
        return first if reason in first else f"{first} ({reason})"

    def failure_within(self, seconds: float) -> str:
        """`failure`, waiting so long for one: lanes break faster than the record that says why arrives."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, seconds)
            return self.failure

    def wait(self, check: Callable[[], T | None], deadline_s: float, missing: Callable[[], str]) -> T:
        """What `check` gives as soon as it is neither None nor False. It runs under the lock, after every record.

        SyncError when the attachment fails first, or after `deadline_s`; then it names what is `missing`.
        """
        deadline = time.monotonic() + deadline_s
        with self._changed:
            while True:
                found = check()
                if found is not None and found is not False:
                    return found
                if self.failure:
                    raise SyncError(self.failure)
                if not self._changed.wait(deadline - time.monotonic()):
                    raise SyncError(f"{self._who} waited {deadline_s:g} s for {missing()}")

    def _take(self, record: Record) -> None:
        with self._changed:
            match record:
                case EngineReady():
                    self._engines.setdefault(record.engine, {})[record.rank] = record
                case TrainerReady() if record.incarnation == self.incarnation:
                    self._trainers.add(record.rank)
                case Attach() if record.incarnation == self.incarnation:
                    self.attach = record
                    ranks = self.engine_world_size(record.engine)
                    self.book = TrainerBook(record.attachment, record.engine, record.trainer_world_size, ranks)
                case Failed() if self.book is None and record.attachment == self.attachment:
                    self._early = self._early or record
                case _ if self.book is not None:
                    self.book.take(record)
            self._changed.notify_all()

    def _on_refused(self, record: Record | None, reason: str) -> None:
        self._on_lost(f"{self._who} {reason}")

    def _on_lost(self, reason: str) -> None:
        with self._changed:
            self._lost = reason
            self._changed.notify_all()
