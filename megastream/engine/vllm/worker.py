"""What megastream does in a vLLM worker: the ordered call, and stamp and live version compared at every step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, Protocol

import msgspec
import torch

from megastream.engine.contract import CommitRequest, WholeLoad
from megastream.engine.digest import tensor_digest
from megastream.engine.vllm import compat, compat_core, hooks
from megastream.engine.vllm.board import BoardSlot
from megastream.engine.vllm.commit_times import CommitTimes, Span
from megastream.engine.vllm.live import VllmLiveModel
from megastream.protocol.records import PlanKind, RankCommit

logger = logging.getLogger("vllm.megastream")

FIRST_LABEL = "0"
UNKNOWN_LABEL = "?"
"""Live version of a rank whose last update broke off: it never equals a stamp."""


class Agent(Protocol):
    """The part of engine.agent.RankAgent that a worker calls."""

    def commit(self, request: CommitRequest) -> RankCommit: ...

    def call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]: ...

    def load_whole(self, version: int, deadline_s: float) -> WholeLoad: ...

    @property
    def attached_kind(self) -> PlanKind | None: ...

    def close(self) -> None: ...


class RankState:
    """One rank's live version, its step count and its records. Worker thread only."""

    def __init__(self, rank: int, device: torch.device):
        self.rank = rank
        self.times = CommitTimes(device)
        self.label = FIRST_LABEL
        self.live: VllmLiveModel | None = None
        self.agent: Agent | None = None
        self.step = 0
        self.differences = 0
        self._slot: BoardSlot | None = None
        self._records: list[tuple[int, str]] | None = None

    def install(self, worker: Any, board: str, records: bool) -> None:
        """Starts comparing: wraps this worker's execute_model, opens the board."""
        self._slot = BoardSlot(board, self.rank)
        self._records = [] if records else None
        self.times.kept = records
        compat_core.wrap_step(worker, self._with_check)

    def _with_check(self, execute_model: Callable[..., Any]) -> Callable[..., Any]:
        def checked(batch: Any, *args: Any, **named: Any) -> Any:
            self.compare(batch)
            return execute_model(batch, *args, **named)

        return checked

    def compare(self, batch: Any) -> None:
        """Reports a batch that was stamped with another version than the one that is live here. Never raises."""
        stamp = compat_core.stamp_of(batch)
        if stamp is None:
            return
        self.step, _, label = stamp
        if self._records is not None:
            self._records.append((self.step, self.label))
        if label != self.label:
            self.differences += 1
            if self._slot is not None:
                self._slot.report()
            logger.error("step %d is stamped %s, but rank %d holds %s", self.step, label, self.rank, self.label)

    def commit(self, payload: dict[str, Any]) -> RankCommit:
        """Commits what the agent has sealed for CommitRequest.read(payload). Never raises.

        The reply's stall is all time that the call took on this thread; on a GPU the copies follow behind it, see
        CommitTime. From the first copy on until all of them are made, the live version is unknown: weights of a commit
        that broke off belong to no version.
        """
        reply = RankCommit(rank=self.rank, ok=False, stall_s=0.0, step=self.step)
        span = Span()
        with hooks.Guard() as guard, torch.no_grad(), self.times.measure(span):
            if self.agent is None:
                raise RuntimeError("no agent is attached")
            request = CommitRequest.read(payload)
            if (request.mix is not None or request.over >= 0) and self.label == UNKNOWN_LABEL:
                raise RuntimeError("weights of no known version take a whole version, not a part of one")
            span.label = request.label
            self.label = UNKNOWN_LABEL
            reply = self.agent.commit(request)
            if reply.ok:
                self.label = request.label
        error = guard.error or reply.error
        return msgspec.structs.replace(
            reply, rank=self.rank, ok=reply.ok and not error, stall_s=span.host_s, step=self.step, error=error
        )

    def relabel(self, label: str) -> None:
        """Renames the live weights, unless it is unknown what they are."""
        if self.label != UNKNOWN_LABEL:
            self.label = label

    def take_records(self) -> list[tuple[int, str]]:
        """(step, live version) of every batch since the last call; a RuntimeError when they are not kept."""
        if self._records is None:
            raise RuntimeError('no records are kept; start the engine with {"megastream": {"records": true}}')
        taken, self._records = self._records, []
        return taken

    def digests(self, names: list[str] | None) -> dict[str, str]:
        """Digest of every live buffer (or of `names`), read back through the live kernels, in loader layout."""
        live = self._model()
        return {name: tensor_digest(live.read_live(name)) for name in names or live.names}

    def inventory(self) -> list[dict[str, Any]]:
        """See VllmLiveModel.inventory."""
        return self._model().inventory()

    def _model(self) -> VllmLiveModel:
        if self.live is None:
            raise RuntimeError("this worker has no live model; serve with --weight-transfer-config megastream")
        return self.live


def megastream_call(worker: Any, op: str, payload: dict[str, Any]) -> Any:
    """The worker method behind every call of the core. Replies are plain; nothing is ever raised.

    `commit` replies a RankCommit, everything else a dict with `ok`, `rank`, `error` and what the operation adds.
    """
    engine = compat.transfer_engine(worker)
    state = getattr(engine, "state", None)
    if not isinstance(state, RankState):
        return _no_backend(worker, op)
    if op == "commit":
        return state.commit(payload)
    result: dict[str, Any] = {}
    with hooks.Guard() as guard, torch.no_grad():
        result = _run(worker, engine, state, op, payload)
    error = guard.error or result.get("error", "")
    return {**result, "ok": not error, "rank": state.rank, "error": error}


def _no_backend(worker: Any, op: str) -> Any:
    rank, error = compat.rank_of(worker), "this worker's weight transfer backend is not megastream"
    if op == "commit":
        return RankCommit(rank=rank, ok=False, stall_s=0.0, step=0, error=error)
    return {"ok": False, "rank": rank, "error": error}


def _run(worker: Any, engine: Any, state: RankState, op: str, payload: dict[str, Any]) -> dict[str, Any]:
    if op == "install":
        state.install(worker, payload["board"], payload["records"])
        return {}
    if op == "label":
        state.relabel(payload["label"])
        return {}
    if op == "status":
        return {"label": state.label, "step": state.step, "differences": state.differences}
    if op == "records":
        return {"records": state.take_records(), "commits": [astuple(time) for time in state.times.take()]}
    if op == "digest":
        return {"label": state.label, "digests": state.digests(payload.get("names"))}
    if op == "inventory":
        return {"parameters": state.inventory()}
    if op == "session":
        return {"active": compat.active_session(worker, drop=payload.get("drop", False)), **engine.session()}
    if state.agent is None:
        raise RuntimeError(f"no agent is attached that could run {op}")
    return state.agent.call(op, payload)
