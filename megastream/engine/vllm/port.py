"""The engine core as the coordinator sees it: ordered commits, version stamps, poisoning. Implements CorePort."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from megastream.engine.contract import CommitRequest
from megastream.engine.vllm import compat_core
from megastream.engine.vllm.board import Board
from megastream.engine.vllm.kv import KvBook, KvPolicy
from megastream.engine.vllm.spans import SpanBook
from megastream.engine.vllm.worker import FIRST_LABEL
from megastream.protocol.mix import Mix
from megastream.protocol.records import RankCommit

logger = logging.getLogger("vllm.megastream")

WORKER_METHOD = "megastream_call"
MOST_MIXES = 1024
"""Mixes of which the versions of all units are kept."""


@dataclass(frozen=True, slots=True)
class PortSettings:
    """`records`: keep them, see take_records. `kv`: what a commit does with keys and values of older versions."""

    records: bool = False
    kv: KvPolicy = "salt"


class VllmCorePort:
    """Public methods may be called from any thread; those with an underscore run in the core's own thread.

    The core is one thread that alternates between its input queue and a step, and workers take steps and calls from
    one queue. So a call that the core's thread sends is ordered against all steps, on every rank, and whatever is
    scheduled after it runs after it.
    """

    def __init__(self, core: Any, num_ranks: int, settings: PortSettings):
        self._core = core
        self._num_ranks = num_ranks
        self._label = FIRST_LABEL
        self._version = int(FIRST_LABEL)
        self._step = 0
        self._open: list[Future[list[Any]]] = []
        self._called_at = -1
        self._waiting: list[Callable[[], None]] = []
        self._poison = ""
        self._board = Board(num_ranks)
        self._reports = self._board.reports()
        self._keeps_records = settings.records
        self._records: list[tuple[int, str, dict[str, int]]] = []
        self._mixes: dict[str, Mix] = {}
        self.kv = KvBook(settings.kv)
        self.spans = SpanBook(self.kv)
        self.updating = False
        """Between a native start_weight_update and its finish. All native calls pass through this core."""
        self.watch_poison: Callable[[bool], None] = lambda poisoned: None
        """Told in the core's thread when requests are refused, and when they are taken again."""

    # -- any thread

    def commit(self, request: CommitRequest, done: Callable[[tuple[RankCommit, ...]], None]) -> None:
        compat_core.enqueue(self._core, partial(self._commit, request, done))

    def call_ranks(self, op: str, payload: dict[str, Any], done: Callable[[tuple[dict[str, Any], ...]], None]) -> None:
        compat_core.enqueue(self._core, partial(self._call_ranks, op, payload, done))

    def poison(self, reason: str) -> None:
        compat_core.enqueue(self._core, partial(self.become_poisoned, reason))

    def live_version(self) -> int:
        return self._version

    # -- the core's thread

    def install(self) -> None:
        """Opens the board on every rank; RuntimeError when a rank could not. Once, before the first step."""
        payload = {"board": str(self._board.path), "records": self._keeps_records}
        for reply in self.ask_ranks("install", payload):
            if not reply["ok"]:
                raise RuntimeError(f"megastream cannot start on engine rank {reply['rank']}: {reply['error']}")
        self._board.unlink()
        compat_core.set_label(self._core, self._label)

    def close(self) -> None:
        self._board.close()

    @property
    def label(self) -> str:
        """What the next scheduled batch is stamped with."""
        return self._label

    @property
    def poisoned(self) -> str:
        """Why new requests are refused; empty when they are not."""
        return self._poison

    def ask_ranks(self, op: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """An ordered call that waits for all replies."""
        return compat_core.call_workers(self._core, WORKER_METHOD, (op, payload))

    def _commit(self, request: CommitRequest, done: Callable[[tuple[RankCommit, ...]], None]) -> None:
        if self._poison and (request.mix is not None or request.over >= 0):
            done((self._refusal(),))
            return
        if self._poison:  # what the other units hold is not known
            request = replace(request, units=None)
        if request.mix is not None:
            self._remember(request.mix)
        future = compat_core.ordered_call(self._core, WORKER_METHOD, ("commit", asdict(request)))
        # From here on: what is scheduled next runs behind the commit on every rank.
        self.set_live(request.label)
        self._watch(future, partial(self._committed, request, done))

    def _committed(
        self,
        request: CommitRequest,
        done: Callable[[tuple[RankCommit, ...]], None],
        replies: list[RankCommit] | None,
        error: str,
    ) -> None:
        """Runs before any output behind the commit is looked at: replies are read in order."""
        ranks = tuple(replies or (RankCommit(rank=-1, ok=False, stall_s=0.0, step=self._step, error=error),))
        failed = [reply for reply in ranks if not reply.ok]
        if failed:
            first = failed[0]
            self.become_poisoned(f"commit of version {request.label} failed on rank {first.rank}: {first.error}")
        elif request.units is None and request.over < 0:
            self.recover()
        elif self._poison:  # since it was enqueued; it has not written every unit
            ranks = (self._refusal(),)
        done(ranks)

    def _refusal(self) -> RankCommit:
        error = f"the engine is poisoned and takes a whole version only: {self._poison}"
        return RankCommit(rank=-1, ok=False, stall_s=0.0, step=self._step, error=error)

    def _remember(self, mix: Mix) -> None:
        self._mixes[mix.label] = mix
        while len(self._mixes) > MOST_MIXES:
            del self._mixes[next(iter(self._mixes))]

    def versions(self, label: str) -> dict[str, Any]:
        """What a token's label means: `oldest`, `newest`, and for a mix the version of every unit in `units`.

        ValueError when the label is none, or the mix is not among the last MOST_MIXES.
        """
        mix = self._mixes.get(label)
        if mix is not None:
            return {"oldest": mix.oldest, "newest": mix.newest, "units": mix.vector()}
        if not label.isdecimal():
            raise ValueError(f"{label!r} is no version, and not among the last {MOST_MIXES} mixes of this engine")
        return {"oldest": int(label), "newest": int(label), "units": {}}

    def _call_ranks(self, op: str, payload: dict[str, Any], done: Callable[[tuple[dict[str, Any], ...]], None]) -> None:
        """At most one such call between two steps: with one rank a reply is there at once, and a caller that answers
        it with the next call (a comparison in slices) would never let the engine step.
        """
        if self._called_at == self._step and compat_core.has_work(self._core):
            self._waiting.append(partial(self._call_ranks, op, payload, done))
            return
        self._called_at = self._step

        def answered(replies: list[dict[str, Any]] | None, error: str) -> None:
            lost = [{"ok": False, "rank": rank, "error": error} for rank in range(self._num_ranks)]
            done(tuple(replies or lost))

        self._watch(compat_core.ordered_call(self._core, WORKER_METHOD, (op, payload)), answered)

    def _watch(self, future: Future[list[Any]], answered: Callable[[list[Any] | None, str], None]) -> None:
        def completed(finished: Future[list[Any]]) -> None:
            error = finished.exception()
            answered(None, str(error)) if error else answered(finished.result(), "")

        self._open = [*(other for other in self._open if not other.done()), future]
        future.add_done_callback(completed)

    def drain_when_idle(self) -> None:
        """Reads the replies that no step will read any more, before the core waits for input."""
        if compat_core.has_work(self._core):
            return
        for future in self._open:
            with suppress(RuntimeError, TimeoutError):
                future.result()
        self._open = []
        self._release()

    def _release(self) -> None:
        """The core goes on with the calls that waited for a step, or for the end of all work."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            compat_core.enqueue(self._core, command)

    def set_live(self, label: str) -> None:
        """From the next scheduled batch on, stamps say `label`."""
        self._label = label
        self._version = int(label) if label.isdecimal() else self._version
        compat_core.set_label(self._core, label)
        self.kv.commit(self._core)

    def stamp(self, batch: Any) -> None:
        """Called for every batch as it is scheduled."""
        self._step += 1
        self._release()
        compat_core.stamp(batch, (self._step, self._version, self._label))
        self.spans.forget(compat_core.finished_before(batch))
        requests = compat_core.scheduled(self._core, batch)
        self.kv.scheduled(self._label, requests, partial(compat_core.blocks_of, self._core))

    def check_reports(self) -> None:
        """Called for every output before its tokens are looked at: discards them when a rank reported a difference."""
        reports = self._board.reports()
        if reports == self._reports:
            return
        ranks = [rank for rank, (old, new) in enumerate(zip(self._reports, reports, strict=True)) if new > old]
        self._reports = reports
        self.become_poisoned(self._poison or f"ranks {ranks} held another version than their batch was stamped with")

    def record(self, batch: Any, outputs: dict[int, Any]) -> str:
        """Called for every output; returns the version that made its tokens."""
        stamp = compat_core.stamp_of(batch)
        assert stamp is not None
        step, _, label = stamp
        new_tokens = self.spans.add(label, outputs, partial(compat_core.has_stop_strings, self._core))
        if self._keeps_records:
            self._records.append((step, label, new_tokens))
        return label

    def become_poisoned(self, reason: str) -> None:
        """Aborts all requests as retryable; a step of theirs that is under way then has nobody to give tokens to."""
        self._poison = reason
        self.watch_poison(True)
        aborted = compat_core.finish_all_retryable(self._core, self.spans.carried)
        logger.error("engine poisoned, %d requests aborted as retryable: %s", aborted, reason)

    def recover(self) -> None:
        """All ranks hold the same version again. Differences reported before that no longer matter."""
        if self._poison:
            logger.warning("engine recovered with version %s", self._label)
            self.watch_poison(False)
        self._poison = ""
        self._reports = self._board.reports()

    def take_records(self) -> dict[str, Any]:
        """What happened since the last call.

        `batches`: (step, stamp, new tokens per request); per rank, in rank order, `ranks`: (step, live version) of each
        batch, and `commits`: (version, seconds on the host, seconds on the GPU or None), see CommitTime.
        """
        if not self._keeps_records:
            raise RuntimeError('no records are kept; start the engine with {"megastream": {"records": true}}')
        replies = self.ask_ranks("records", {})
        for reply in replies:
            if not reply["ok"]:
                raise RuntimeError(f"engine rank {reply['rank']}: {reply['error']}")
        batches, self._records = self._records, []
        ranks, commits = [[reply[key] for reply in replies] for key in ("records", "commits")]
        return {"steps": self._step, "batches": batches, "ranks": ranks, "commits": commits}
