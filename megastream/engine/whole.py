"""Plan kind `whole`: full tensors for the engine's own loader, taken only while the engine is paused."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from math import prod

import torch

from megastream.engine.scatter import finish_on_gpu, scatter, target_regions, torch_dtype
from megastream.engine.settings import EngineSettings
from megastream.layout.shard import RankLayout, TensorSpec
from megastream.plan.types import Copy, Plan
from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneError, LaneTimeout
from megastream.protocol.staging import PieceRefused, StagingTable, Verdict
from megastream.protocol.terms import Terms

QUEUED_TENSORS = 8
"""Complete tensors that may wait for the loader before the lanes are held up."""


class WholeSink:
    """Assembles full tensors for one engine rank. Without a `receive` under way no piece is admitted."""

    def __init__(self, terms: Terms, plan: Plan, layout: RankLayout, settings: EngineSettings) -> None:
        self._plan, self._rank, self._settings = plan, layout.rank, settings
        self._table = StagingTable(terms, plan, layout.rank, num_sets=1)
        self._specs: dict[str, TensorSpec] = {spec.name: spec for spec in layout.tensors}
        self._need: Counter[str] = Counter()
        for piece in plan.by_target.get(layout.rank, ()):
            self._need.update(_elements(piece.copies))
        self._accepted: dict[int, int] = {}
        self._window: int | None = None
        """The version that is loaded now, until the monotonic second `_until`."""
        self._until = 0.0
        self._partial: dict[str, torch.Tensor] = {}
        self._have: Counter[str] = Counter()
        self._complete: deque[tuple[str, torch.Tensor]] = deque()
        self._changed = threading.Condition()
        self._broken = ""

    def admit(self, header: PieceHeader, source: int) -> bool:
        """Waits until the paused engine asks for this version, and until the trainer accepted it."""
        deadline = time.monotonic() + self._settings.liveness_s
        with self._changed:
            while (verdict := self._decide(header, source)) is Verdict.WAIT:
                if self._broken:
                    raise LaneError(self._broken)
                if not self._changed.wait(deadline - time.monotonic()):
                    raise PieceRefused(
                        f"engine rank {self._rank} was not asked to load version {header.version} for "
                        f"{self._settings.liveness_s:.0f} s; the host pauses the engine and calls update_weights"
                    )
            return verdict is Verdict.TAKE

    def write(self, header: PieceHeader, payload: torch.Tensor) -> None:
        piece = self._plan.pieces[header.seq]
        counts = _elements(piece.copies)
        with self._changed:
            if header.version != self._window:  # the load that took it broke off meanwhile
                return
            for name in counts:
                if name not in self._partial:
                    spec = self._specs[name]
                    dtype = torch_dtype(spec.dtype)
                    self._partial[name] = torch.empty(spec.shape, dtype=dtype, device=payload.device)
            flat = {name: self._partial[name].view(-1) for name in counts}
        scatter(piece, payload, target_regions(piece, flat.__getitem__))
        finish_on_gpu(payload)
        with self._changed:
            if header.version != self._window:
                return
            self._have.update(counts)
            complete = [name for name in counts if self._have[name] == self._need[name]]
            tensors = [(name, self._partial.pop(name)) for name in complete]
        for tensor in tensors:
            self._put(tensor, header.version)

    def lost(self, header: PieceHeader) -> None:
        with self._changed:
            self._table.lost(header)

    def settle(self, header: PieceHeader) -> None:
        with self._changed:
            self._table.arrived(header)
            self._changed.notify_all()

    def accepted(self, version: int, attempt: int) -> None:
        with self._changed:
            self._accepted[version] = attempt
            self._table.accepted(version, attempt)
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """The attachment ended: whoever waits here stops with the reason."""
        with self._changed:
            self._broken = self._broken or reason
            self._table.end()
            self._changed.notify_all()

    def receive(self, version: int, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every full tensor of `version` under its HF name, as it becomes complete. Worker thread.

        LaneTimeout when they are not all there after `deadline_s`; LaneError when the attachment ended meanwhile.
        """
        self._open(version, time.monotonic() + deadline_s)
        try:
            for done in range(len(self._need)):
                name, tensor = self._next(version, done)
                if tensor.is_cuda:  # allocated on a lane's stream: not to be reused before the loader has read it
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
                yield name, tensor
        finally:
            self._close(version)

    def _open(self, version: int, until: float) -> None:
        with self._changed:
            self._have.clear()
            self._partial.clear()
            self._complete.clear()
            self._window, self._until = version, until
            self._changed.notify_all()

    def _close(self, version: int) -> None:
        with self._changed:
            self._window = None
            self._table.committed(version)
            self._accepted = {v: attempt for v, attempt in self._accepted.items() if v > version}
            self._partial.clear()
            self._changed.notify_all()

    def _next(self, version: int, done: int) -> tuple[str, torch.Tensor]:
        with self._changed:
            there = self._changed.wait_for(lambda: self._complete or self._broken, self._until - time.monotonic())
            if self._broken:
                raise LaneError(self._broken)
            if not there:
                raise LaneTimeout(
                    f"engine rank {self._rank} waited for the trainer until its deadline: {done} of {len(self._need)} "
                    f"tensors of version {version} are in"
                )
            self._changed.notify_all()
            return self._complete.popleft()

    def _put(self, tensor: tuple[str, torch.Tensor], version: int) -> None:
        with self._changed:
            there = self._changed.wait_for(
                lambda: len(self._complete) < QUEUED_TENSORS or self._broken or self._window != version,
                self._until - time.monotonic(),
            )
            if self._broken:
                raise LaneError(self._broken)
            if not there:
                raise LaneTimeout(
                    f"engine rank {self._rank}: {tensor[0]} of version {version} waited for the engine's loader until "
                    f"its deadline; {QUEUED_TENSORS} tensors are queued before it"
                )
            if self._window != version:
                return
            self._complete.append(tensor)
            self._changed.notify_all()

    def _decide(self, header: PieceHeader, source: int) -> Verdict:
        if self._window is None or header.version > self._window or header.version not in self._accepted:
            return Verdict.WAIT
        if header.version < self._window or header.attempt != self._accepted[header.version]:
            return Verdict.DROP  # overtaken or withdrawn: its elements must not count as this version's
        return self._table.admit(header, source).verdict


def _elements(copies: tuple[Copy, ...]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for copy in copies:
        counts[copy.target_buffer] += prod(copy.shape)
    return counts
