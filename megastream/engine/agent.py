"""The agent of one engine rank: it lives in the engine's worker process and follows the control log in a thread.

Receiving, checking and preparing happen in its own threads. Three things are done on the worker's thread, in calls
that the core orders between two steps: `commit`, `call` (see calls.py) and `load_whole`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megastream.engine.attachment import Attachment, make_attachment
from megastream.engine.calls import RankCalls
from megastream.engine.contract import ENGINE_ERRORS, CommitRequest, LiveModel, LiveModelError, WholeLoad
from megastream.engine.inlet import LaneReceiver
from megastream.engine.settings import EngineSettings
from megastream.engine.stream import StreamSink
from megastream.engine.whole import WholeSink
from megastream.layout.shard import RankLayout
from megastream.protocol.bind import engine_blob, plan_of, put_layout, put_refusal, put_units
from megastream.protocol.control import ControlError, ControlLog
from megastream.protocol.follow import Follower, Outbox
from megastream.protocol.lane import LaneError
from megastream.protocol.mix import Gate
from megastream.protocol.records import (
    Accepted,
    Attach,
    Attached,
    Detached,
    EngineReady,
    Failed,
    LanesOpen,
    Loaded,
    PlanKind,
    RankCommit,
    Record,
)
from megastream.protocol.terms import ProtocolError, check_terms

logger = logging.getLogger(__name__)


class RankAgent:
    """One per engine rank. `start` after the weights are loaded; `close` before the worker exits."""

    def __init__(
        self,
        log: ControlLog,
        *,
        engine: str,
        rank: int,
        world_size: int,
        live: LiveModel,
        receiver: LaneReceiver,
        settings: EngineSettings,
        library: str = "",
        gate: Gate = "version",
        watch: Callable[[Attachment | None], None] = lambda current: None,
    ) -> None:
        """`gate` is the one that holds at first; how it changes is the coordinator's, see RankCalls.

        `watch` is shown the attachment at least every `settings.poll_s`, in the follower's thread.
        """
        self._log, self._live, self._receiver, self._settings = log, live, receiver, settings
        self.engine, self.rank, self.world_size, self._library = engine, rank, world_size, library
        self._layouts: dict[PlanKind, RankLayout] = {}
        self._refusals: dict[PlanKind, str] = {}
        self._current: Attachment | None = None
        self._next: Attach | None = None
        self._live_version = 0
        self._commits = 0
        self._gate = gate
        self._gate_lock = threading.Lock()
        self._outbox = Outbox(log, f"engine-rank-{rank}", retry_s=settings.retry_s)
        self._follower = Follower(
            log,
            f"engine-rank-{rank}",
            take=self._take,
            refused=self._refused,
            lost=self._lost,
            tick=lambda: watch(self._current),
            poll_s=settings.poll_s,
            retry_s=settings.retry_s,
        )
        self._calls = RankCalls(rank, live, settings, self._outbox.post, lambda: self._current, self._choose)

    @property
    def live_version(self) -> int:
        """The newest version that all of this rank's weights held; 0 before the first update."""
        return self._live_version

    @property
    def attached_kind(self) -> PlanKind | None:
        """Kind of the attachment that this rank is bound to, None without one."""
        current = self._current
        return None if current is None or current.ended else current.terms.kind

    def start(self) -> None:
        """Publishes this rank's layouts and starts following the log. ControlError when the control plane is away.

        A model that cannot be patched in place still starts: it is refused by name when a trainer attaches.
        """
        describers: dict[PlanKind, Callable[[], RankLayout]] = {
            "stream": self._live.describe,
            "whole": self._live.describe_whole,
        }
        for kind, describe in describers.items():
            blob = engine_blob(self.engine, self.rank, kind)
            try:
                self._layouts[kind] = describe()
            except LiveModelError as error:
                self._refusals[kind] = str(error)
            else:
                put_layout(self._log, blob, self._layouts[kind])
            put_refusal(self._log, blob, self._refusals.get(kind, ""))
        self._outbox.start()
        self._outbox.post(
            EngineReady(engine=self.engine, rank=self.rank, world_size=self.world_size, library=self._library)
        )
        self._follower.start()

    def close(self) -> None:
        """Ends lanes and threads. Idempotent."""
        self._follower.stop()
        if self._current is not None:
            self._current.end("the engine is shutting down")
            self._current.inlet.join(1.0)
            self._current = None
        self._outbox.close()

    # ---- worker thread

    def commit(self, request: CommitRequest) -> RankCommit:
        """Makes a staged version live, in the engine's ordered call. Never raises; a failure was tried twice."""
        begin = time.monotonic()
        current = self._current
        if current is None or current.terms.attachment != request.attachment:
            error = f"attachment {request.attachment} is not bound here"
        elif not isinstance(current.sink, StreamSink):
            error = f"attachment {request.attachment} is of kind whole; its versions come through a paused update"
        else:
            error = current.sink.commit(request)
        if error:
            logger.error("engine rank %d could not commit version %s: %s", self.rank, request.label, error)
        elif request.mix is None:
            self._live_version = request.version
        self._commits += 1
        stall_s = time.monotonic() - begin
        return RankCommit(rank=self.rank, ok=not error, stall_s=stall_s, step=self._commits, error=error)

    def call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The worker's side of CorePort.call_ranks, see RankCalls. Plain data in and out; never raises."""
        return self._calls.answer(op, payload)

    def receive_whole(self, version: int, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors of `version` under their HF names, as they arrive. Only while the engine is paused."""
        return self._whole(version)[1].receive(version, deadline_s)

    def load_whole(self, version: int, deadline_s: float) -> WholeLoad:
        """Receives `version` and runs the engine's own reload on it. Only while the engine is paused; blocks.

        ProtocolError when no attachment of kind `whole` is there; LaneError or one of ENGINE_ERRORS when it broke
        off, and then the weights are not whole and the host must not resume.
        """
        current, sink = self._whole(version)
        try:
            load = self._live.load_whole(sink.receive(version, deadline_s))
        except ENGINE_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            self._fail(current.terms.attachment, f"engine rank {self.rank} could not load version {version}: {reason}")
            raise
        self._live_version = version
        self._outbox.post(
            Loaded(
                attachment=current.terms.attachment,
                version=version,
                rank=self.rank,
                load_s=load.load_s,
                repair_s=load.repair_s,
            )
        )
        return load

    def _whole(self, version: int) -> tuple[Attachment, WholeSink]:
        current = self._current
        if current is None or not isinstance(current.sink, WholeSink):
            raise ProtocolError(
                f"engine rank {self.rank} was asked to load version {version} whole, but no trainer is attached with "
                f"kind whole; updates of kind stream need no call"
            )
        return current, current.sink

    # ---- follower's thread

    def _take(self, record: Record) -> None:
        if isinstance(record, Attach):
            if record.engine == self.engine:
                self._attach(record)
            return
        name = getattr(record, "attachment", None)
        if self._next is not None and isinstance(record, Failed) and name == self._next.attachment:
            self._next = None
        if self._current is not None and name == self._current.terms.attachment:
            self._take_own(self._current, record)

    def _take_own(self, current: Attachment, record: Record) -> None:
        match record:
            case LanesOpen():
                self._open(current, record)
            case Accepted():
                current.sink.accepted(record.version, record.attempt)
            case Attached() if isinstance(current.sink, StreamSink):
                current.sink.passed(record.version)
            case Failed():
                current.end(record.reason)
            case Detached():
                self._current = None
                current.end("the attachment was detached")
                if self._next is not None:
                    self._bind(self._next)

    def _attach(self, record: Attach) -> None:
        if self._current is None:
            self._bind(record)
        else:  # the coordinator ends the current one first, or refuses this one
            self._next = record

    def _bind(self, record: Attach) -> None:
        self._next = None
        try:
            check_terms(record)
            if record.kind in self._refusals:
                raise ProtocolError(self._refusals[record.kind])
            plan = plan_of(self._log, record, self.world_size, ("engine", self.rank))
            bound = make_attachment(
                record,
                plan,
                self._layouts[record.kind],
                run_id=self._log.run_id,
                live=self._live,
                receiver=self._receiver,
                settings=self._settings,
                post=self._outbox.post,
                gate=self._gate,
            )
            self._adopt(bound)
            addresses = bound.inlet.addresses()
            if self.rank == 0:
                put_units(self._log, record, plan.units)
        except (ValueError, LaneError, ControlError) as error:
            self._fail(record.attachment, f"engine rank {self.rank} cannot bind: {error}")
            return
        self._outbox.post(bound.said(self.rank, addresses))

    def _adopt(self, bound: Attachment) -> None:
        """From here on this is the attachment. The gate may have changed on the worker's thread while it was made."""
        with self._gate_lock:
            self._current = bound
            bound.choose(self._gate)

    def _choose(self, gate: Gate) -> None:
        """Versions that arrive from here on are cut for `gate`. ProtocolError when the plan cannot be."""
        with self._gate_lock:
            if self._current is not None:
                self._current.choose(gate)
            self._gate = gate

    def _open(self, current: Attachment, record: LanesOpen) -> None:
        if record.digest != current.plan.digest:
            self._fail(
                current.terms.attachment,
                f"engine rank {self.rank} built plan {current.plan.digest}, the trainer opens lanes of {record.digest}",
            )
        elif not current.ended:
            current.inlet.open()

    def _refused(self, record: Record | None, reason: str) -> None:
        """Whatever a record held, it ends its attachment at most."""
        attachment = getattr(record, "attachment", "")
        if attachment and not isinstance(record, Failed | Detached):  # no answer to what was an answer
            self._fail(attachment, f"engine rank {self.rank} {reason}")

    def _fail(self, attachment: str, reason: str) -> None:
        self._outbox.post(Failed(attachment=attachment, side="engine", rank=self.rank, reason=reason))

    def _lost(self, reason: str) -> None:
        if self._current is not None and not self._current.ended:
            self._current.end(reason)
            self._fail(self._current.terms.attachment, f"engine rank {self.rank} had lost the control plane: {reason}")
