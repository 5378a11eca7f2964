"""All engines that one trainer rank feeds: who is there, who is left behind, who comes while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from megastream.protocol.control import ControlError, ControlLog
from megastream.protocol.journal import Journal, SyncError, describe_failed
from megastream.protocol.records import Attach
from megastream.protocol.step_records import Connected
from megastream.sync import records
from megastream.sync.binding import Binder
from megastream.sync.feed import Feed, FeedLost

logger = logging.getLogger(__name__)


class Feeds:
    """With `strict` the first engine that is lost ends the training: SyncError. Otherwise it is left behind.

    Belongs to the training thread, except `add`, `join_late` and what a stepper calls beside it.
    """

    def __init__(self, log: ControlLog, journal: Journal, binder: Binder, *, rank: int, strict: bool) -> None:
        self._log, self._journal, self._binder = log, journal, binder
        self._rank, self._strict = rank, strict
        self._lock = threading.Lock()
        self._feeds: dict[str, Feed] = {}
        self._closed = False
        self.taking: list[Feed] = []
        """Those that the open version goes to."""

    @property
    def all(self) -> list[Feed]:
        """In the order in which they came."""
        with self._lock:
            return list(self._feeds.values())

    def named(self, attachments: Iterable[str]) -> list[Feed]:
        with self._lock:
            return [self._feeds[name] for name in attachments if name in self._feeds]

    def add(self, feed: Feed) -> None:
        with self._lock:
            if not self._closed:
                self._feeds[feed.attach.attachment] = feed
                return
        feed.close()

    def each(self, feeds: Iterable[Feed], call: Callable[[Feed], object]) -> None:
        """Calls for every one that is still there. SyncError when one is lost and all are needed."""
        for feed in list(feeds):
            if feed.alive:
                with suppress(FeedLost):
                    call(feed)
            self._leave_if_lost(feed)

    def check(self) -> None:
        """SyncError when training cannot go on; engines that are lost are left behind."""
        if self._journal.failure:
            raise SyncError(self._journal.failure)
        for feed in self.all:
            self._leave_if_lost(feed)

    def join_late(self, attach: Attach) -> None:
        """Binds an engine beside the training, in a thread of its own. It gets nothing before an opening names it."""
        threading.Thread(
            target=self._join, args=(attach,), name=f"megastream-join-{self._rank}-{attach.attachment}", daemon=True
        ).start()

    def close(self) -> None:
        """Frees lanes and threads; blocks for one send per engine at most. Idempotent."""
        with self._lock:
            self._closed = True
        for feed in self.all:
            feed.close()

    def _join(self, attach: Attach) -> None:
        reason = "its thread broke off, the traceback is on stderr"
        try:
            self.add(self._binder.feed(self._journal, attach))
            self._log.append(Connected(attachment=attach.attachment, rank=self._rank))
            reason = ""
        except (ValueError, RuntimeError) as error:  # lanes, drivers, torch, the emitter, the control plane
            reason = str(error)
        finally:
            if reason:
                self._say_lost(attach, reason)

    def _say_lost(self, attach: Attach, reason: str) -> None:
        logger.warning("engine %s could not be bound (%s): %s", attach.engine, attach.attachment, reason)
        if not self._journal.books[attach.attachment].is_over:
            with suppress(ControlError):
                self._log.append(records.failed(attach.attachment, self._rank, reason))

    def _leave_if_lost(self, feed: Feed) -> None:
        failed = feed.book.failed
        if failed is not None:
            feed.lose(describe_failed(failed))
        if not feed.lost:
            return  # also when the engine has answered the end of training, which another rank may have reached before
        reason = feed.lost
        if self._strict:
            raise SyncError(self._journal.explain(reason))
        with self._lock:
            there = self._feeds.pop(feed.attach.attachment, None)
        self.taking = [other for other in self.taking if other is not feed]
        if there is not None:
            logger.warning("engine %s is left behind (%s): %s", feed.engine, feed.attach.attachment, reason)
