"""What trainer rank 0 decides for all ranks, in a thread of its own: who is asked to attach, and who takes a version.

It never waits for a training thread, so a rank that waits for its word inside a backward does not wait for another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from megastream.protocol.control import ControlError, ControlLog
from megastream.protocol.journal import Journal
from megastream.protocol.records import Failed
from megastream.protocol.roster import Roster
from megastream.protocol.step_records import Opened
from megastream.sync.binding import Binder
from megastream.trainer.settings import TrainerSettings

_TICK_S = 0.25
_INVITE_EVERY_S = 1.0

logger = logging.getLogger(__name__)


class Usher:
    """`fail` ends the training of all ranks with a reason."""

    def __init__(
        self,
        log: ControlLog,
        journal: Journal,
        binder: Binder,
        settings: TrainerSettings,
        fail: Callable[[str], object],
    ) -> None:
        self._log, self._journal, self._binder, self._settings = log, journal, binder, settings
        self._fail = fail
        self._roster = Roster(journal.incarnation, journal.books)
        self._newest, self._train_step = -1, 0
        self._due: int | None = None
        self._opened: Opened | None = None
        self._answered = 0
        self._num_attachments = settings.engines
        self._invited_s: dict[str, float] = {}
        """When engines were asked to attach while training goes on, by attachment; of those not read back yet."""
        self._looked_s = 0.0
        self._alone_since_s: float | None = None
        self._whole_since_s: dict[str, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megastream-usher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Nobody is asked to attach any more, and no version is opened. Idempotent."""
        self._stopped.set()
        with self._journal.changed:
            self._journal.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(2 * _TICK_S)

    def note_sent(self, attachment: str, version: int, attempt: int) -> None:
        """The training thread accepted this version for the attachment; its pieces are on their way."""
        with self._journal.changed:
            self._roster.note_sent(attachment, version, attempt)

    def open_after(self, version: int, train_step: int) -> None:
        """`version` is finished: the next one is opened as soon as it is known who takes it. Returns at once."""
        with self._journal.changed:
            self._newest, self._train_step, self._due = version, train_step, version + 1
            self._journal.changed.notify_all()

    def close_at(self, version: int, deadline_s: float) -> None:
        """`version` was the last: waits until nothing is on any lane, then says who has to get it still."""
        self.settle(deadline_s)
        with self._journal.changed:
            last = self._roster.last(version)
        self._log.append(last)

    def settle(self, deadline_s: float) -> None:
        """Blocks until nothing is on any lane. SyncError names who still has something there."""
        self._journal.wait(
            lambda: not self._roster.unsettled(),
            deadline_s,
            lambda: f"{', '.join(self._roster.unsettled())} to take the last version that was sent",
        )

    def _run(self) -> None:
        reason = "the thread that opens versions broke off, its traceback is on stderr"
        seen = (-1, -1)
        try:
            while not self._stopped.is_set():
                seen = self._await_change(seen)
                self._look()
            reason = ""
        except ControlError as error:
            reason = str(error)
        finally:
            if reason and not self._stopped.is_set():
                self._journal.end(reason)

    def _await_change(self, seen: tuple[int, int]) -> tuple[int, int]:
        """Blocks until there is more than `seen`, for one tick at most."""
        journal = self._journal

        def now() -> tuple[int, int]:
            return journal.num_taken, self._newest

        with journal.changed:
            journal.changed.wait_for(lambda: now() != seen or self._stopped.is_set(), _TICK_S)
            return now()

    def _look(self) -> None:
        if (opening := self._decide()) is not None:
            self._log.append(opening)
        if self._settings.late_joiners:
            self._invite()
            self._end_what_is_late()

    # ---- versions

    def _decide(self) -> Opened | None:
        """The opening that is due, or once more the newest one, where somebody may have missed it."""
        with self._journal.changed:
            if self._due is None:
                return self._reopen() or self._again()
            waiting = self._journal.waiting.get(self._due, [])
            late = self._roster.unsettled()
            if waiting and time.monotonic() - waiting[0] < self._settings.lag_s:
                late = self._roster.worth_waiting_for()
            elif waiting:
                late = []
            if late:
                return None
            self._opened, self._due, self._answered = self._roster.open(self._due), None, len(waiting)
            return self._opened

    def _reopen(self) -> Opened | None:
        """The next attempt at the newest version, once every rank has taken the one before back."""
        if self._opened is None:
            return None
        ranks = self._journal.taken_back.get((self._opened.version, self._opened.attempt), {})
        if len(ranks) < self._binder.world_size:
            return None
        lagging = {name for record in ranks.values() for name in record.lagging}
        self._opened = self._roster.reopen(self._opened, lagging)
        return self._opened

    def _again(self) -> Opened | None:
        """A server that lost its data may have lost the record: whoever asks behind it gets it again."""
        if self._opened is None:
            return None
        asked = len(self._journal.waiting.get(self._opened.version, []))
        if asked <= self._answered:
            return None
        self._answered = asked
        return self._opened

    # ---- engines

    def _invite(self) -> None:
        """Asks every engine to attach that is up and free."""
        now = time.monotonic()
        if self._newest < 0 or now - self._looked_s < _INVITE_EVERY_S:
            return
        self._looked_s = now
        with self._journal.changed:
            there = self._journal.attaches
            self._invited_s = {name: at for name, at in self._invited_s.items() if name not in there}
            if any(now - at < self._settings.bind_s for at in self._invited_s.values()):
                return  # it has not come back yet; later than that, a server has lost it together with its data
            free = self._journal.free_engines(self._settings.engine)
            base, train_step = self._newest, self._train_step
        for engine in free:
            if self._binder.is_here(self._journal, engine):
                number, self._num_attachments = self._num_attachments, self._num_attachments + 1
                logger.info("engine %s is asked to attach at version %d or newer", engine, base)
                self._log.append(self._binder.attach_record(self._journal, number, engine, base, train_step, late=True))
                self._invited_s[self._journal.name(number)] = time.monotonic()

    def _end_what_is_late(self) -> None:
        """An engine that has its first version whole and does not take it; a training that is alone for too long."""
        now, settings = time.monotonic(), self._settings
        with self._journal.changed:
            alone = not self._roster.engines()
            pending = [
                (name, book)
                for name, book in self._journal.books.items()
                if book.attached is None and book.whole_version >= 0 and not book.is_over
            ]
        for name, book in pending:
            if now - self._whole_since_s.setdefault(name, now) > settings.attach_s:
                reason = (
                    f"trainer rank 0 waited {settings.attach_s:g} s for engine {book.engine} to take its first version"
                )
                self._whole_since_s[name] = now
                self._log.append(Failed(attachment=name, side="trainer", rank=0, reason=reason))
        if not alone:
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = now
        elif now - self._alone_since_s > settings.alone_s:
            self._fail(
                f"no engine was attached for {settings.alone_s:g} s; training stops behind version {self._newest}"
            )
            self._stopped.set()
