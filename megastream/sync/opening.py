"""The time between two steps on one trainer rank: who takes the next version, and what has to leave before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from megastream.protocol.control import ControlLog
from megastream.protocol.journal import Journal
from megastream.protocol.step_records import Opened, TakenBack, Waiting
from megastream.sync import records
from megastream.sync.binding import GRACE_S
from megastream.sync.feed import CAUSE_S, Feed
from megastream.sync.feeds import Feeds
from megastream.sync.usher import Usher
from megastream.trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class Emission:
    """A version as it was sent last, and the optimizer step that made it."""

    version: int = -1
    attempt: int = 0
    train_step: int = 0


@dataclass(frozen=True, slots=True)
class Opening:
    """What a step cost this rank before its weights could change, and who takes its version. Names of engines.

    `wait_s`: how long this rank waited for engines in all, of it `join_s` for those that joined. `slot_wait_s`: how
    long packing waited for slots, beside the training, for the slowest engine, in what has settled since the opening
    before. `skipped`: attached, but still busy with an older version, or with an attempt at this one that was taken
    back, so that this one passes them by. `withdrawn`: an older version was taken back from them on this rank, because
    it was not packed when the weights had to change.
    """

    version: int = -1
    wait_s: float = 0.0
    join_s: float = 0.0
    slot_wait_s: float = 0.0
    takes: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()


@dataclass
class Boundary:
    """Used by the training thread of every rank, with the same calls. `buffers` are the names of all buckets."""

    log: ControlLog
    journal: Journal
    feeds: Feeds
    settings: TrainerSettings
    rank: int
    buffers: Iterable[str]
    usher: Usher | None
    """On rank 0."""
    _num_lasts: int = field(default=0, init=False)

    def open(self, version: int, newest: Emission) -> Opening:
        """Everything that `version` waits for; then no weight is read any more, and `feeds.taking` is who gets it.

        Engines that join are sent the newest version whole, as a new attempt. Blocks for `lag_s` and, when some join,
        `join_s`; SyncError when rank 0 says nothing.
        """
        begin = time.monotonic()
        opened = self.journal.openings.get((version, 0)) or self._ask(version)
        asked = time.monotonic()
        joins = self.feeds.named(opened.joins)
        self.feeds.each(joins, lambda feed: self.resend(feed, newest))
        withdrawn = self._free_leases(joins)
        end = time.monotonic()
        self.feeds.taking = self.feeds.named(opened.takes)
        return Opening(
            version,
            wait_s=end - begin,
            join_s=end - asked if joins else 0.0,
            slot_wait_s=max((feed.take_slot_wait_s() for feed in self.feeds.all), default=0.0),
            takes=_engines(self.feeds.taking),
            joined=_engines(joins),
            skipped=self._skipped(),
            withdrawn=_engines(withdrawn),
        )

    def reopen(self, open_: Emission, opening: Opening) -> Opening:
        """The open attempt does not count: it is taken back everywhere, and `feeds.taking` is who gets the next one.

        Who still has some of it on a lane after `lag_s`, on any rank, skips the version. Blocks so long at most, and
        for rank 0's word; SyncError when that does not come. `opening` is the version's so far.
        """
        begin, taking = time.monotonic(), self.feeds.taking
        until = begin + min(self.settings.lag_s, self.settings.transfer_s)
        lagging: list[str] = []

        def await_arrival(feed: Feed) -> None:
            if not feed.is_drained_within(max(until - time.monotonic(), 0.0)):
                lagging.append(feed.attach.attachment)

        self.feeds.each(taking, Feed.revoke)
        self.feeds.each(taking, await_arrival)
        self.log.append(
            TakenBack(
                incarnation=self.journal.incarnation,
                version=open_.version,
                attempt=open_.attempt,
                rank=self.rank,
                lagging=tuple(lagging),
            )
        )
        takes = self.feeds.taking = self.feeds.named(self._await_opened(open_.version, open_.attempt + 1).takes)
        self.feeds.each(takes, Feed.say_wasted)
        left = [feed for feed in taking if feed not in takes]
        self.feeds.each(left, lambda feed: feed.finish(open_.version, open_.attempt, open_.train_step))
        wait_s = opening.wait_s + time.monotonic() - begin
        return replace(opening, wait_s=wait_s, takes=_engines(self.feeds.taking), skipped=self._skipped())

    def last(self, newest: Emission, *, counts: bool) -> None:
        """Behind the last step: who skipped its version, or came late, gets it. Returns when it has left this rank.

        Without `counts` the last step did not count, and nobody says what it left behind: nothing is sent.
        """
        limit_s = 2 * self.settings.transfer_s + CAUSE_S
        self.feeds.each(self.feeds.all, Feed.join)
        if self.usher is not None:
            self.usher.close_at(newest.version, limit_s)
        number, self._num_lasts = self._num_lasts, self._num_lasts + 1
        last = self._wait(lambda: self.journal.last(number), limit_s, "trainer rank 0 to end training")
        joins = self.feeds.named(last.joins if counts else ())
        self.feeds.each(joins, lambda feed: self.resend(feed, newest))
        self.feeds.each(joins, Feed.join)
        if self.usher is not None:
            self.usher.settle(limit_s)

    def finish(self, reason: str) -> None:
        """Behind `last`: ends every attachment and waits for the engines' answers. SyncError when one that all need
        was lost meanwhile."""
        self.feeds.check()
        if self.usher is not None:
            self.usher.stop()
            for name, book in list(self.journal.books.items()):
                if not book.is_over and book.whole_version < 0:
                    self.log.append(records.failed(name, self.rank, f"training has ended before it joined: {reason}"))
        feeds = [feed for feed in self.feeds.all if feed.alive and feed.book.whole_version >= 0]
        for feed in feeds if self.rank == 0 else ():
            self.log.append(records.training_finished(feed.attach, feed.book.whole_version, reason))
        late = self.settings.late_joiners
        for feed in feeds:
            self.journal.wait(
                lambda book=feed.book: book.detached or (late and book.is_over),  # type: ignore[misc]
                self.settings.detach_s,
                lambda feed=feed: f"engine {feed.engine} to answer the end of training",  # type: ignore[misc]
            )

    def resend(self, feed: Feed, newest: Emission) -> None:
        """The weights as they are, to one engine, under the version that they are."""
        attempt = newest.attempt + 1
        feed.begin(newest.version, attempt)
        self.accept(feed, Emission(newest.version, attempt, newest.train_step))
        for buffer in self.buffers:
            feed.final(buffer)
        feed.finish(newest.version, attempt, newest.train_step)

    def accept(self, feed: Feed, sent: Emission) -> None:
        """Rank 0 says that this is the version's attempt that counts."""
        if self.rank != 0:
            return
        self.log.append(records.accepted(feed.attach, sent.version, sent.attempt, sent.train_step))
        if self.usher is not None:
            self.usher.note_sent(feed.attach.attachment, sent.version, sent.attempt)

    def _ask(self, version: int) -> Opened:
        """Says that this rank waits: from then on the slow engines' time runs."""
        self.log.append(Waiting(incarnation=self.journal.incarnation, version=version, rank=self.rank))
        return self._await_opened(version, 0)

    def _await_opened(self, version: int, attempt: int) -> Opened:
        limit_s = 2 * self.settings.transfer_s + self.settings.lag_s
        missing = f"trainer rank 0 to open version {version}" + (f", attempt {attempt}" if attempt else "")
        return self._wait(lambda: self.journal.openings.get((version, attempt)), limit_s, missing)

    def _wait(self, check: Callable[[], Opened | None], limit_s: float, missing: str) -> Opened:
        return self.journal.wait(check, limit_s + GRACE_S, lambda: missing)

    def _free_leases(self, joins: list[Feed]) -> list[Feed]:
        """Who joins has `join_s` until its version is packed; the others have had their time."""
        until = time.monotonic() + self.settings.join_s
        withdrawn: list[Feed] = []

        def free(feed: Feed, seconds: float) -> None:
            limit_s = seconds if feed.revocable else self.settings.transfer_s
            if feed.is_packed_within(limit_s):
                return
            if feed.pulls:
                raise feed.lose(f"engine {feed.engine} did not pull what it does not stage within {limit_s:g} s")
            feed.revoke()
            withdrawn.append(feed)

        self.feeds.each([feed for feed in self.feeds.all if feed not in joins], lambda feed: free(feed, 0.0))
        self.feeds.each(joins, lambda feed: free(feed, max(until - time.monotonic(), 0.0)))
        return withdrawn

    def _skipped(self) -> tuple[str, ...]:
        """Engines that are attached and do not get the open version."""
        taking = self.feeds.taking
        return _engines(feed for feed in self.feeds.all if feed.book.attached is not None and feed not in taking)


def _engines(feeds: Iterable[Feed]) -> tuple[str, ...]:
    return tuple(feed.engine for feed in feeds)
