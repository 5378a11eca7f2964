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

Every trainer rank makes the same calls in the same order. Every wait ends: with what it waited for, with a SyncError
that names who failed and why, or with a SyncError that says who waited for whom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from megastream.plan.types import Plan
from megastream.protocol.book import TrainerBook
from megastream.protocol.control import ControlError, ControlLog
from megastream.protocol.journal import EnginePoisoned, Journal, SyncError
from megastream.protocol.lane import LaneError
from megastream.protocol.records import Attach, Attached, Committed, PlanKind
from megastream.sync import records
from megastream.sync.binding import GRACE_S, Binder, TrainerModel
from megastream.trainer.emit import Emitter
from megastream.trainer.outgoing import EmitError, EmitReport
from megastream.trainer.settings import TrainerSettings
from megastream.trainer.stepper import Listener

T = TypeVar("T")

CAUSE_S = 1.0  # how long a broken emission waits for the record that says who failed first


class TrainerSync:
    """One per trainer rank and start. Not thread-safe, except `final`."""

    def __init__(
        self, log: ControlLog, *, rank: int, world_size: int, trainer: TrainerModel, settings: TrainerSettings
    ) -> None:
        self._log, self._trainer, self._settings = log, trainer, settings
        self.rank, self.world_size, self._who = rank, world_size, f"trainer rank {rank}"
        self._journal: Journal | None = None
        self._emitter: Emitter | None = None
        self._plan: Plan | None = None
        self._attach: Attach | None = None
        self._version, self._attempt, self._train_step = -1, 0, 0
        self._accepted, self._ended = False, False
        self._held: list[str] = []
        """Final buckets of a version of kind `whole` that is not accepted yet."""
        self._closer: threading.Thread | None = None
        self._error: SyncError | None = None
        self.reports: list[EmitReport] = []
        """What this rank emitted, one entry per version and attempt, the base version first."""
        self.opening_s = 0.0
        """How long the last step waited before its weights could change: for leases, and for acknowledgements."""

    @property
    def plan(self) -> Plan:
        """The agreed plan; only after `attach`."""
        assert self._plan is not None, "attach first"
        return self._plan

    @property
    def next_version(self) -> int:
        """The number for the next step that counts."""
        return self._version + 1 if self._accepted else self._version

    @property
    def live_version(self) -> int:
        """The newest version known to be live on the engine; -1 before the attachment."""
        return self._book.live_version if self._attach is not None else -1

    def attach(self, kind: PlanKind = "stream", base_version: int | None = None, train_step: int = 0) -> Attached:
        """Binds this trainer to the engine and pushes the weights as they are now. Blocks; all ranks.

        Without `base_version` the base is numbered above all that was ever published: 0 in a new run. SyncError when
        an engine or a trainer rank does not come, when plans differ, or when the engine refuses the weights.
        """
        binder = Binder(self._log, self._trainer, self._settings, rank=self.rank, world_size=self.world_size)
        journal = self._journal = binder.announce()
        try:
            if self.rank == 0:
                binder.post_attach(journal, kind, base_version, train_step)
        except (ValueError, ControlError, SyncError) as error:
            self._failed(str(error))
            raise
        self._attach = self._wait(lambda: journal.attach, self._settings.ready_s + GRACE_S, "trainer rank 0 to attach")
        try:
            self._plan = binder.bind(journal, self._attach, self._book)
            self._emitter = binder.open_lanes(self._attach, self._plan, self._book)
        except (ValueError, LaneError, EmitError, ControlError, SyncError) as error:
            raise self._failed(str(error)) from error
        self._push_base(self._attach)
        missing = f"engine {self._attach.engine} to compare and take base version {self._version}"
        return self._wait(lambda: self._book.attached, self._settings.attach_s, missing)

    def finished(self, reason: str) -> None:
        """Ends the attachment once the last version is out and the engine has answered. Blocks; all ranks."""
        self._join()
        attach = self._bound
        if self.rank == 0:
            self._log.append(records.training_finished(attach, self.next_version - 1, reason))
        self._wait(
            lambda: self._book.detached,
            self._settings.detach_s,
            f"engine {attach.engine} to answer the end of training",
        )
        self._ended = True

    def close(self) -> None:
        """Frees lanes and threads. Without `finished` before, the engine is told that this rank left. Idempotent."""
        if self._journal is not None and not self._ended:
            self._failed("left before training was finished")
        self._ended = True
        if self._emitter is not None:
            self._emitter.close()
            self._emitter = None
        if self._closer is not None:
            self._closer.join(CAUSE_S)  # the emitter is closed: nothing is left to wait for
        if self._journal is not None:
            self._journal.stop()

    @property
    def listener(self) -> Listener:
        """For `stepper`: opens the next version before weights change, emits buckets, withdraws what does not count.

        A version that is withdrawn is open again, under its next attempt; its train step is one above the last opened.
        """
        return Listener(self.final, self._opens, lambda: self.begin(self._version, self._train_step))

    def _opens(self) -> None:
        begin = time.monotonic()
        self.wait_leases()
        self.begin(self.next_version, self._train_step + 1)
        self.opening_s = time.monotonic() - begin

    def begin(self, version: int, train_step: int) -> None:
        """Opens a version before its optimizer step; the same number again opens its next attempt.

        Blocks until the engine has acknowledged the version before (backpressure), or what was on the way of the
        attempt before, which is withdrawn.
        """
        self._join()
        expected = self.next_version
        if version != expected:
            raise ValueError(f"{self._who} begins version {version}, but version {expected} is next")
        if version == self._version:
            self._withdraw()
        self._attempt = self._attempt + 1 if version == self._version else 0
        self._version, self._train_step, self._accepted = version, train_step, False
        self._emit(lambda emitter: emitter.begin(version, self._attempt))

    def final(self, buffer: str) -> None:
        """The bucket's bytes are final and stay until `wait_leases`. Returns at once; for the stepper's `on_final`.

        With kind `whole` nothing leaves before `accept`: a paused engine takes accepted versions only.
        """
        if self._bound.kind == "whole" and not self._accepted:
            self._held.append(buffer)
        else:
            self._final(buffer)

    def accept(self) -> None:
        """The step counts: the open attempt is this version. All ranks call it; rank 0 says so."""
        self._accepted = True
        if self.rank == 0:
            self._log.append(records.accepted(self._bound, self._version, self._attempt, self._train_step))
        held, self._held = self._held, []
        for buffer in held:
            self._final(buffer)

    def finish(self) -> None:
        """Every bucket of the accepted version was said to be final. Returns at once; the rest goes on behind.

        Rank 0 writes the manifest when all ranks' pieces are acknowledged. What fails there is raised by the next
        `begin`, `wait_committed` or `finished`.
        """
        if not self._accepted:
            raise ValueError(f"{self._who} finishes version {self._version} before accept")
        self._closer = threading.Thread(target=self._complete, name=f"megastream-complete-{self.rank}", daemon=True)
        self._closer.start()

    def wait_leases(self) -> None:
        """Blocks until the weights may change again: everything final is packed. Before every optimizer step."""
        self._emit(lambda emitter: emitter.wait_packed())

    def wait_committed(self, version: int, deadline_s: float) -> Committed:
        """Blocks until `version` or a newer one is live. EnginePoisoned when the engine could not take `version`."""
        book = self._book
        missing = f"version {version} to become live on engine {book.engine}"
        self._wait(lambda: book.committed_at(version) or book.is_poisoned_by(version), deadline_s, missing)
        if committed := book.committed_at(version):
            return committed
        raise EnginePoisoned(f"engine {book.engine} is poisoned: {book.poisoned and book.poisoned.reason}")

    @property
    def _bound(self) -> Attach:
        if self._attach is None:
            raise SyncError(f"{self._who} is not attached; call attach first")
        return self._attach

    @property
    def _book(self) -> TrainerBook:
        if self._journal is None or self._journal.book is None:
            raise SyncError(f"{self._who} is not attached; call attach first")
        return self._journal.book

    def _push_base(self, attach: Attach) -> None:
        """The base version takes the same way as all others, so that attaching proves the way."""
        self._version, self._attempt, self._train_step = attach.base_version, 0, attach.train_step
        self._emit(lambda emitter: emitter.begin(self._version, 0))
        self.accept()
        for buffer in self._trainer.buffers:
            self.final(buffer)
        self.finish()
        self._join()

    def _complete(self) -> None:
        """Runs in a thread of its own for each version; keeps its error for the training thread."""
        version, attempt, train_step = self._version, self._attempt, self._train_step
        try:
            report = self._emit(lambda emitter: emitter.drain(self._settings.transfer_s))
            self._emitted(report)
            if self.rank == 0:
                self._post_manifest(version, attempt, train_step)
        except (SyncError, ControlError, ValueError) as error:
            self._error = error if isinstance(error, SyncError) else self._failed(str(error))

    def _emitted(self, report: EmitReport) -> None:
        self.reports.append(report)
        self._log.append(records.emitted(self._bound, self.rank, report))

    def _final(self, buffer: str) -> None:
        self._emit(lambda emitter: emitter.final(buffer))

    def _withdraw(self) -> None:
        """The open attempt does not count; what went out of it is said, so that it shows as wasted."""
        self._held = []
        report = self._emit(lambda emitter: emitter.withdraw(self._settings.transfer_s))
        if report.pieces:
            self._emitted(report)

    def _post_manifest(self, version: int, attempt: int, train_step: int) -> None:
        book = self._book

        def missing() -> str:
            return f"{', '.join(book.not_emitted(version, attempt))} to emit version {version}"

        self._wait(lambda: not book.not_emitted(version, attempt), self._settings.transfer_s, missing)
        manifest = book.manifest(self.plan, self._bound.incarnation, version, attempt, train_step)
        self._log.raise_version(version)
        self._log.append(manifest)

    def _emit(self, call: Callable[[Emitter], T]) -> T:
        if self._emitter is None:
            raise SyncError(f"{self._who} is not attached; call attach first")
        try:
            return call(self._emitter)
        except EmitError as error:
            if self._journal is not None:
                self._journal.failure_within(CAUSE_S)
            raise self._failed(str(error)) from error

    def _join(self) -> None:
        """Waits for the version before, and raises what went wrong with it."""
        if self._closer is not None:
            limit = 2 * self._settings.transfer_s + CAUSE_S  # its own waits end before: the drain, then the manifest
            self._closer.join(limit)
            if self._closer.is_alive():
                raise self._failed(f"{self._who} waited {limit:g} s for version {self._version} to be acknowledged")
            self._closer = None
        if self._error is not None:
            raise self._error

    def _wait(self, check: Callable[[], T | None], deadline_s: float, missing: str | Callable[[], str]) -> T:
        if self._journal is None:
            raise SyncError(f"{self._who} is not attached; call attach first")
        try:
            return self._journal.wait(check, deadline_s, missing if callable(missing) else lambda: missing)
        except SyncError as error:
            raise self._failed(str(error)) from error

    def _failed(self, reason: str) -> SyncError:
        """Tells the others that this rank cannot go on; the error names who failed first."""
        assert self._journal is not None
        if not self._journal.failure:
            with suppress(ControlError):
                self._log.append(records.failed(self._journal.attachment, self.rank, reason))
        return SyncError(self._journal.explain(reason))
