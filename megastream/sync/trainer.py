"""The trainer's facade: all that the author of a training loop imports.

    sync = TrainerSync(log, rank=rank, world_size=world_size, trainer=adapter, settings=settings)
    sync.attach("stream")
    stepper = adapter.stepper("pipelined", sync.listener)
    while training:
        forward_backward()
        if stepper.step().ok:
            sync.accept()
            sync.finish()
    stepper.close()
    sync.finished("done")

Every trainer rank makes the same calls in the same order. Every wait ends: with what it waited for, or with a SyncError
that says who failed and why, or who waited for whom. Every engine has an attachment, lanes and slots of its own. With
`settings.late_joiners` one that is lost is left behind, and one that comes up joins with the newest version, whole.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from megastream.plan.types import Plan
from megastream.protocol.book import TrainerBook
from megastream.protocol.control import ControlError, ControlLog
from megastream.protocol.journal import EnginePoisoned, Journal, SyncError
from megastream.protocol.records import Attach, Attached, Committed, PlanKind
from megastream.sync import records
from megastream.sync.binding import GRACE_S, Binder, TrainerModel
from megastream.sync.feed import Feed, FeedLost
from megastream.sync.feeds import Feeds
from megastream.sync.opening import Boundary, Emission, Opening
from megastream.sync.usher import Usher
from megastream.trainer.outgoing import EmitReport
from megastream.trainer.settings import TrainerSettings
from megastream.trainer.stepper import Listener

T = TypeVar("T")


class TrainerSync:
    """One per trainer rank and start. Not thread-safe, except `final`."""

    def __init__(
        self, log: ControlLog, *, rank: int, world_size: int, trainer: TrainerModel, settings: TrainerSettings
    ) -> None:
        self._log, self._trainer, self._settings = log, trainer, settings
        self.rank, self._who = rank, f"trainer rank {rank}"
        self._binder = Binder(log, trainer, settings, rank=rank, world_size=world_size)
        self._journal: Journal | None = None
        self._boundary: Boundary | None = None
        self._open, self._before = Emission(), Emission()
        """The version that was opened last, and the accepted one before it."""
        self._accepted, self._skipped, self._caught_up, self._ended = False, False, False, False
        self._held: list[str] = []
        """Final buckets of a version of kind `whole` that is not accepted yet."""
        self.opening = Opening()
        """What the last step waited for before its weights could change."""

    @property
    def plan(self) -> Plan:
        """The plan of the first engine; only after `attach`."""
        return self._feeds.all[0].plan

    @property
    def engines(self) -> list[str]:
        """The engines that are attached, as far as this rank knows."""
        return [feed.engine for feed in self._attached]

    @property
    def reports(self) -> list[EmitReport]:
        """What this rank emitted to the engines that are there, one entry per version and attempt, the base first."""
        return [report for feed in self._feeds.all for report in feed.reports]

    @property
    def next_version(self) -> int:
        """The number for the next step that counts."""
        return self._open.version + 1 if self._accepted else self._open.version

    @property
    def live_version(self) -> int:
        """The newest version known to be live on every attached engine; -1 without one."""
        return min((feed.book.live_version for feed in self._attached), default=-1)

    def attach(
        self, kind: PlanKind = "stream", base_version: int | None = None, train_step: int = 0, over: int = -1
    ) -> Attached:
        """Binds this trainer to `settings.engines` engines and pushes the weights as they are now. Blocks; all ranks.

        Without `base_version` the base is numbered above all that was published: 0 in a new run. `over`: see Attach.
        SyncError when an engine or a trainer rank does not come, plans differ, or an engine refuses the weights.
        """
        settings = self._settings
        if kind == "whole" and (settings.late_joiners or settings.engines > 1):
            raise ValueError("updates of kind whole are for one engine without late joiners; attach with kind stream")
        journal = self._journal = self._binder.announce()
        feeds = Feeds(self._log, journal, self._binder, rank=self.rank, strict=not settings.late_joiners)
        usher = Usher(self._log, journal, self._binder, settings, self._failed) if self.rank == 0 else None
        self._boundary = Boundary(self._log, journal, feeds, settings, self.rank, self._trainer.buffers, usher)
        journal.on_late = feeds.join_late
        try:
            if self.rank == 0:
                self._binder.post_attaches(journal, kind, base_version, train_step, over)
        except (ValueError, ControlError, SyncError) as error:
            self._failed(str(error))
            raise
        limit_s = settings.ready_s + GRACE_S
        attaches = self._wait(lambda: journal.first_attaches(settings.engines), limit_s, "trainer rank 0 to attach")
        try:
            for attach in attaches:
                feeds.add(self._binder.feed(journal, attach))
        except (ValueError, RuntimeError) as error:  # lanes, drivers, torch, the emitter, the control plane
            raise self._failed(str(error)) from error
        return self._push_base(attaches, usher)

    def catch_up(self) -> None:
        """Behind the last step: engines that do not have the newest version that counts get it now. Blocks; all ranks.

        Returns when it has left this rank for all of them; `wait_committed` waits until it is live.
        """
        self._feeds.check()
        newest = self._before if self._skipped else self._open
        self._raising(lambda: self._bound.last(newest, counts=self._accepted or self._skipped))
        self._caught_up = True

    def finished(self, reason: str) -> None:
        """Ends every attachment once the last version is out and the engine has answered. Blocks; all ranks."""
        if not self._caught_up:
            self.catch_up()
        self._raising(lambda: self._bound.finish(reason))
        self._ended = True

    def close(self) -> None:
        """Frees lanes and threads. Without `finished` before, engines are told that this rank left. Idempotent."""
        if self._journal is None:
            return
        if not self._ended:
            self._failed("left before training was finished")
        self._ended = True
        if self._boundary is not None:
            if self._boundary.usher is not None:
                self._boundary.usher.stop()
            self._boundary.feeds.close()
        self._journal.stop()

    @property
    def listener(self) -> Listener:
        """For `stepper`: opens the next version before weights change, emits buckets, withdraws what does not count.

        A version that is withdrawn is open again, under its next attempt; its train step is one above the last opened.
        """
        return Listener(
            self.final,
            lambda: self.begin(self.next_version, self._open.train_step + 1),
            lambda: self.begin(self._open.version, self._open.train_step),
        )

    def begin(self, version: int, train_step: int) -> None:
        """Opens a version before its optimizer step; the same number again opens its next attempt.

        When it returns, weights may change. Before that it waits, `settings.lag_s` at most, for engines that have not
        acknowledged the version before, or what left of its last attempt; who is not done then skips this one. An
        engine that joins gets the newest version now, which holds the step for `settings.join_s` at most.
        """
        feeds = self._feeds
        feeds.check()
        expected, attempt = self.next_version, 0
        if version != expected:
            raise ValueError(f"{self._who} begins version {version}, but version {expected} is next")
        if version == self._open.version:
            self._held = []
            so_far = Opening(version) if self._skipped else self.opening  # that step has said what it cost
            self.opening = self._raising(lambda: self._bound.reopen(self._open, so_far))
            attempt = self._open.attempt + 1
        else:
            self.opening = self._raising(lambda: self._bound.open(version, self._open))
            self._before = self._open
        self._open = Emission(version, attempt, train_step)
        self._accepted = self._skipped = self._caught_up = False
        feeds.each(feeds.taking, lambda feed: feed.begin(version, attempt))

    def final(self, buffer: str) -> None:
        """The bucket's bytes are final and stay until `begin`. Returns at once; for the stepper's `on_final`.

        With kind `whole` nothing leaves before `accept`: a paused engine takes accepted versions only.
        """
        taking = self._feeds.taking
        if any(feed.attach.kind == "whole" for feed in taking) and not self._accepted:
            self._held.append(buffer)
        else:
            self._feeds.each(taking, lambda feed: feed.final(buffer))

    def accept(self) -> None:
        """The step counts: the open attempt is this version. All ranks call it; rank 0 says so."""
        self._accepted = True
        for feed in self._feeds.taking:
            self._bound.accept(feed, self._open)
        while self._held:
            self.final(self._held.pop(0))

    def skip(self) -> None:
        """The step does not count and left the weights as they were; the version stays open. All ranks call it."""
        self._skipped = not self._accepted

    def finish(self) -> None:
        """Every bucket of the accepted version was said to be final. Returns at once; the rest goes on behind.

        Rank 0 writes the manifests when all ranks' pieces are acknowledged. What fails there is raised by the next
        `begin`, `wait_committed` or `finished`.
        """
        now = self._open
        if not self._accepted:
            raise ValueError(f"{self._who} finishes version {now.version} before accept")
        for feed in self._feeds.taking:
            feed.finish(now.version, now.attempt, now.train_step)
        if self._bound.usher is not None:
            self._bound.usher.open_after(now.version, now.train_step)

    def wait_committed(self, version: int, deadline_s: float) -> Committed | None:
        """Blocks until `version` or a newer one is live on every attached engine that it goes to; the first one's word.

        Behind `catch_up`: until what each of them got last is. None without engines. EnginePoisoned when one could not.
        """
        self._feeds.check()
        late, to_all = self._settings.late_joiners, self._caught_up or self.opening.version != version
        books = [feed.book for feed in self._attached if to_all or feed in self._feeds.taking]  # some skip it, or join

        def answered(book: TrainerBook) -> object:
            wanted = min(version, book.whole_version) if self._caught_up else version
            return book.live_version >= wanted or book.is_poisoned_by(version) or (late and book.is_over)

        for book in books:
            missing = f"version {version} to become live on engine {book.engine}"
            self._wait(lambda book=book: answered(book), deadline_s, missing)  # type: ignore[misc]
            if book.is_poisoned_by(version):
                raise EnginePoisoned(f"engine {book.engine} is poisoned: {book.poisoned and book.poisoned.reason}")
        return next((book.committed_at(version) for book in books if not book.is_over), None)

    @property
    def _bound(self) -> Boundary:
        if self._boundary is None:
            raise SyncError(f"{self._who} is not attached; call attach first")
        return self._boundary

    @property
    def _feeds(self) -> Feeds:
        return self._bound.feeds

    @property
    def _attached(self) -> list[Feed]:
        feeds = self._boundary.feeds.all if self._boundary is not None else []
        return [feed for feed in feeds if feed.alive and feed.book.attached is not None]

    def _push_base(self, attaches: list[Attach], usher: Usher | None) -> Attached:
        """The base version takes the same way as all others, so that attaching proves the way."""
        feeds, base = self._feeds.all, attaches[0]
        self._open, self._accepted = Emission(base.base_version, -1, base.train_step), True
        try:
            for feed in feeds:
                self._bound.resend(feed, self._open)
            for feed in feeds:
                feed.join()
        except FeedLost as error:
            raise self._failed(str(error)) from error
        self._open = Emission(base.base_version, 0, base.train_step)
        for feed in feeds:
            missing = f"engine {feed.engine} to compare and take base version {base.base_version}"
            self._wait(lambda feed=feed: feed.book.attached, self._settings.attach_s, missing, feed.book)  # type: ignore[misc]
        if usher is not None:
            usher.open_after(base.base_version, base.train_step)
            usher.start()
        attached = feeds[0].book.attached
        assert attached is not None
        return attached

    def _raising(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (SyncError, ControlError) as error:
            raise self._failed(str(error)) from error

    def _wait(
        self, check: Callable[[], T | None], deadline_s: float, missing: str, book: TrainerBook | None = None
    ) -> T:
        if self._journal is None:
            raise SyncError(f"{self._who} is not attached; call attach first")
        journal = self._journal
        return self._raising(lambda: journal.wait(check, deadline_s, lambda: missing, book))

    def _failed(self, reason: str) -> SyncError:
        """Tells all engines and the other ranks that this rank cannot go on; the error names who failed first."""
        assert self._journal is not None
        if not self._journal.failure:
            attachments = [name for name, book in self._journal.books.items() if not book.is_over]
            with suppress(ControlError):
                for attachment in attachments or [self._journal.name(0)]:
                    self._log.append(records.failed(attachment, self.rank, reason, self._journal.incarnation))
        return SyncError(self._journal.explain(reason))
