"""One attachment as one trainer rank feeds it: its plan, its lanes, the version that is on its way."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress

from megastream.plan.types import Plan
from megastream.protocol.book import TrainerBook
from megastream.protocol.control import ControlError, ControlLog
from megastream.protocol.journal import Journal, SyncError
from megastream.protocol.records import Attach
from megastream.sync import records
from megastream.trainer.emit import Emitter
from megastream.trainer.outgoing import EmitError, EmitReport, Still
from megastream.trainer.pulled import PullEmitter
from megastream.trainer.settings import TrainerSettings

KEPT_REPORTS = 16
CAUSE_S = 1.0  # how long a broken emission waits for the record that says who failed first

logger = logging.getLogger(__name__)


class FeedLost(Exception):
    """This attachment cannot go on. The message is for whoever asks why."""


class Feed:
    """The calls of the training thread raise FeedLost; whatever ends it is said once, in a Failed record and in `lost`.

    A version goes `begin`, `final` for each bucket, `finish`; from then on a thread of its own waits for the engine.
    """

    def __init__(
        self,
        log: ControlLog,
        journal: Journal,
        attach: Attach,
        plan: Plan,
        emitter: Emitter,
        settings: TrainerSettings,
        rank: int,
        pulled: PullEmitter | None = None,
    ) -> None:
        """`pulled` emits what the engine does not stage, when there is any of it on this rank."""
        self._log, self._journal, self._settings, self._rank = log, journal, settings, rank
        self.attach, self.plan, self._emitter, self._pulled = attach, plan, emitter, pulled
        self._closer: threading.Thread | None = None
        self.reports: deque[EmitReport] = deque(maxlen=KEPT_REPORTS)
        """The newest ones, oldest first."""
        self._slot_waits_s: deque[float] = deque()
        """Of what was reported since somebody asked."""
        self.lost = ""

    @property
    def book(self) -> TrainerBook:
        return self._journal.books[self.attach.attachment]

    @property
    def engine(self) -> str:
        return self.attach.engine

    @property
    def alive(self) -> bool:
        return not self.lost and not self.book.is_over

    @property
    def revocable(self) -> bool:
        """A paused engine stands until it has the version that was accepted, and so does one whose commit pulls: that
        version is never taken back."""
        return self.attach.kind == "stream" and not self.pulls

    @property
    def pulls(self) -> bool:
        """The engine's commit takes some of this rank's bytes from their buckets."""
        return self._pulled is not None

    @property
    def _emitters(self) -> list[Emitter]:
        """The one that lends its lanes comes last: whoever closes them in this order breaks nothing off."""
        return [self._emitter] if self._pulled is None else [self._pulled, self._emitter]

    def begin(self, version: int, attempt: int) -> None:
        """Opens a version; the one before has settled, or no bucket of it became final."""
        self.join()
        try:
            for emitter in self._emitters:
                emitter.begin(version, attempt)
        except EmitError as error:
            raise self._broken(error) from error

    def final(self, buffer: str) -> None:
        try:
            for emitter in self._emitters:
                emitter.final(buffer)
        except EmitError as error:
            raise self._broken(error) from error

    def finish(self, version: int, attempt: int, train_step: int) -> None:
        """Every bucket was said to be final. Returns at once; rank 0 says how it ended when all ranks are done."""
        self._closer = threading.Thread(
            target=self._settle,
            args=(version, attempt, train_step),
            name=f"megastream-settle-{self._rank}-{self.attach.attachment}",
            daemon=True,
        )
        self._closer.start()

    def join(self) -> None:
        """Waits until the version before has settled, and says what went wrong with it."""
        if self._closer is not None:
            self._closer.join()  # its own waits end: for the engine, for the other ranks, for the control plane
            self._closer = None
        if self.lost:
            raise FeedLost(self.lost)

    def is_packed_within(self, seconds: float) -> bool:
        """No weight is read any more, now or in so many seconds."""
        until = time.monotonic() + seconds
        try:
            return all(each.is_packed_within(max(until - time.monotonic(), 0.0)) for each in self._emitters)
        except EmitError as error:
            raise self._broken(error) from error

    def revoke(self) -> None:
        """The version that is on its way never becomes whole here; weights may change at once."""
        try:
            for emitter in self._emitters:
                emitter.revoke()
        except EmitError as error:
            raise self._broken(error) from error

    def is_drained_within(self, seconds: float) -> bool:
        """What is on the lanes of the open attempt has arrived, now or in so many seconds."""
        until = time.monotonic() + seconds
        try:
            return all(each.is_drained_within(max(until - time.monotonic(), 0.0)) for each in self._emitters)
        except EmitError as error:
            raise self._broken(error) from error

    def say_wasted(self) -> None:
        """What went out of the open attempt, which was taken back and has arrived, is said: it shows as wasted."""
        try:
            report = self._emitter.drain(0.0)
        except EmitError as error:
            raise self._broken(error) from error
        if report.pieces:
            self._emitted(report)

    def take_slot_wait_s(self) -> float:
        """For how long packing waited for slots, in what has settled since the last call."""
        waits_s = [self._slot_waits_s.popleft() for _ in range(len(self._slot_waits_s))]
        return sum(waits_s)

    def lose(self, reason: str) -> FeedLost:
        """Ends the attachment for all, at once for this rank: from here on no weight is read for it."""
        first = self.lost
        self.lost = first or reason
        if not first:
            if not self.book.is_over and not self._journal.failure:
                with suppress(ControlError):
                    self._log.append(records.failed(self.attach.attachment, self._rank, reason))
            self.stop()
        return FeedLost(self.lost)

    def stop(self) -> None:
        """Takes back what is on its way; lanes and threads are freed behind. Idempotent."""
        for emitter in self._emitters:
            with suppress(EmitError):
                emitter.revoke()
        threading.Thread(target=self._close_emitters, name=f"megastream-close-{self._rank}", daemon=True).start()

    def _close_emitters(self) -> None:
        for emitter in self._emitters:
            emitter.close()

    def close(self) -> None:
        """Frees lanes and threads; blocks for one send at most. Idempotent."""
        self._close_emitters()
        if self._closer is not None:
            self._closer.join(CAUSE_S)  # the emitter is closed: nothing is left to wait for

    def _settle(self, version: int, attempt: int, train_step: int) -> None:
        """Runs in a thread of its own for each version; what fails is met by the training thread."""
        settings = self._settings
        under_way = records.under_way(self.attach, self._rank, version, attempt)
        every_s = min(settings.transfer_s, settings.attach_s, settings.detach_s) / 2  # other ranks may wait so long
        try:
            self._emitted(self._emitter.drain(settings.transfer_s, every_s, lambda: self._log.append(under_way)))
            if self._rank == 0:
                self._say_how_it_ended(version, attempt, train_step)
            if self._pulled is not None:
                self._send_pulled(self._pulled, version, attempt, every_s, lambda: self._log.append(under_way))
        except EmitError as error:
            self._broken(error)
        except (SyncError, ControlError, ValueError) as error:
            self.lose(str(error))

    def _send_pulled(self, pulled: PullEmitter, version: int, attempt: int, every_s: float, still: Still) -> None:
        """Waits until the engine's commit asks for it, or the version was taken back and nothing will."""
        book, key, limit_s = self.book, (version, attempt), self._settings.transfer_s

        def is_taken_back() -> bool:
            return book.settled >= key and book.whole_version != version

        def missing() -> str:
            return f"engine {self.engine} to commit version {version}, of which it pulls a part"

        self._journal.wait(lambda: book.asked >= key or is_taken_back(), limit_s, missing, book)
        if book.asked >= key:
            pulled.let_go()
        else:
            pulled.revoke()
        pulled.drain(limit_s, every_s, still)

    def _emitted(self, report: EmitReport) -> None:
        self.reports.append(report)
        self._slot_waits_s.append(report.wait_s)
        self._log.append(records.emitted(self.attach, self._rank, report))

    def _say_how_it_ended(self, version: int, attempt: int, train_step: int) -> None:
        book = self.book

        def missing() -> str:
            return f"{', '.join(book.not_emitted(version, attempt))} to emit version {version}"

        self._journal.wait(lambda: not book.not_emitted(version, attempt), self._settings.transfer_s, missing, book)
        end = book.manifest(self.plan, self.attach.incarnation, version, attempt, train_step)
        self._log.raise_version(version)
        self._log.append(end)

    def _broken(self, error: EmitError) -> FeedLost:
        cause = self._journal.failure_within(CAUSE_S, self.book)
        reason = str(error)
        return self.lose(f"{cause} ({reason})" if cause and cause not in reason else reason)
