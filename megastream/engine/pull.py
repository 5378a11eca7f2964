"""What one engine rank has no staging for: taken from the trainer inside the commit, straight into the live weights."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from math import prod

import torch

from megastream.engine.contract import ENGINE_ERRORS, LiveModel
from megastream.engine.scatter import finish_on_gpu, scatter, target_regions, torch_dtype
from megastream.engine.settings import EngineSettings
from megastream.layout.shard import RankLayout
from megastream.plan.types import Piece
from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneError
from megastream.protocol.staging import Key, PieceRefused

NOBODY = Key(-1, -1, -1)
Take = Callable[[str, torch.Tensor], None]
"""Gets a buffer's name and new values, flat."""


class Pull:
    """`run` belongs to the worker's thread, inside the ordered call; lanes' threads bring pieces meanwhile.

    Buffers that live in the layout of the loader are written where they are, by the lanes. Others are put together in
    memory of their own, one after the other as they become complete, and written by the worker.

    A version of which a pull broke off is never pulled again: what still comes of it is thrown away.
    """

    def __init__(self, pieces: Iterable[Piece], layout: RankLayout, live: LiveModel, settings: EngineSettings) -> None:
        self._pieces = {piece.seq: piece for piece in pieces}
        self._rank, self._live = layout.rank, live
        self._wait_s, self._pull_s = settings.commit_s, settings.commit_s / 2
        self._specs = {spec.name: spec for spec in layout.buffers}
        self._need: Counter[str] = Counter()
        for piece in self._pieces.values():
            for copy in piece.copies:
                self._need[copy.target_buffer] += prod(copy.shape)
        self._changed = threading.Condition()
        self._now, self._over = NOBODY, NOBODY
        """The version that is pulled now; the newest of which nothing more is taken."""
        self._admitted: set[int] = set()
        self._arrived = self._writing = 0
        self._have: Counter[str] = Counter()
        self._apart: dict[str, torch.Tensor] = {}
        """Buffers that are being put together."""
        self._complete: deque[tuple[str, torch.Tensor]] = deque()
        self._steps: torch.cuda.Event | None = None
        """On a GPU: behind the last step that reads what is written now."""
        self._instead: Take | None = None
        self._broken = ""

    @property
    def pieces(self) -> Iterable[Piece]:
        return self._pieces.values()

    # ---- lanes' threads

    def admit(self, key: Key, header: PieceHeader) -> bool:
        """Waits until the commit of `key` is under way. False: it is over, throw the piece away."""
        with self._changed:
            if not self._changed.wait_for(lambda: key <= max(self._now, self._over) or self._broken, self._wait_s):
                raise PieceRefused(
                    f"engine rank {self._rank} has piece {header.seq} ({header.unit}, version {header.version}) "
                    f"to pull, but no commit of it came for {self._wait_s:g} s"
                )
            if key != self._now and self._broken:
                raise LaneError(self._broken)
            if key != self._now:
                return False
            if header.seq in self._admitted:
                raise PieceRefused(f"piece {header.seq} ({header.unit}) of version {header.version} was pulled already")
            self._admitted.add(header.seq)
            return True

    def write(self, key: Key, header: PieceHeader, payload: torch.Tensor) -> None:
        piece = self._pieces[header.seq]
        with self._changed:
            if key != self._now:  # it was given up meanwhile
                return
            buffers = {copy.target_buffer: self._target(copy.target_buffer) for copy in piece.copies}
            self._writing += 1
        written = False
        try:
            self._scatter(piece, payload, buffers)
            written = True
        finally:
            with self._changed:
                self._writing -= 1
                if written and key == self._now:
                    self._count(piece)
                self._changed.notify_all()

    def _scatter(self, piece: Piece, payload: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> None:
        """Behind the steps that read these weights; what it has written is there when it returns."""
        targets = buffers.values()
        for target in targets:
            if target.is_cuda and self._steps is not None:
                torch.cuda.current_stream(target.device).wait_event(self._steps)
        scatter(piece, payload, target_regions(piece, buffers.__getitem__))
        for target in targets:
            finish_on_gpu(target)

    def lost(self, header: PieceHeader) -> None:
        self.end(f"the lane from trainer rank {header.source} broke while version {header.version} was pulled")

    def end(self, reason: str) -> None:
        """Nobody sends any more: who waits stops with the reason."""
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()

    # ---- the worker's thread

    def run(self, key: Key, instead: Take | None = None) -> str:
        """Takes everything that is pulled of a version; empty when all of it is live, else why not. Blocks, for half
        of `commit_s` at most. `instead` of being written, each buffer is given to it, put together."""
        with self._changed:
            self._instead = instead
            if self._broken:
                self._over = max(self._over, key)
                return f"nobody sends what has to be pulled: {self._broken}"
            self._now, self._arrived = key, 0
            self._admitted.clear()
            self._have.clear()
            self._steps = self._mark()
            self._changed.notify_all()
        try:
            return self._take_all(time.monotonic() + self._pull_s)
        finally:
            self.give_up(key)

    def give_up(self, key: Key) -> None:
        """What still comes of this version is thrown away; what is being written is in its place when this returns."""
        with self._changed:
            self._now, self._over = NOBODY, max(self._over, key)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._writing, self._pull_s):
                self._broken = self._broken or f"a piece was still being written {self._pull_s:g} s later"
            self._apart.clear()
            self._complete.clear()

    def _take_all(self, until: float) -> str:
        left = len(self._pieces)
        while True:
            with self._changed:
                there = self._changed.wait_for(
                    lambda: self._complete or self._broken or self._arrived == left, until - time.monotonic()
                )
                if not self._complete:
                    return "" if self._arrived == left else self._why_not(there)
                name, tensor = self._complete.popleft()
            if error := self._take(name, tensor):
                return error

    def _why_not(self, there: object) -> str:
        what = f"{self._arrived} of {len(self._pieces)} pieces were pulled"
        if there:
            return f"{what}, then {self._broken}"
        return f"{what} within {self._pull_s:g} s, half of commit_s; raise it, or give staging more bytes"

    def _take(self, name: str, tensor: torch.Tensor) -> str:
        """Absolute values: what failed is made again once."""
        error = ""
        for _ in range(2):
            try:
                if self._instead is not None:
                    self._instead(name, tensor)
                else:
                    self._live.write_live({name: tensor})
                return ""
            except ENGINE_ERRORS as failure:
                error = f"{type(failure).__name__}: {failure}"
        return error

    # ---- under the lock

    def _target(self, name: str) -> torch.Tensor:
        """Where the elements of a buffer go: the live ones, or memory of their own."""
        if self._instead is None and (live := self._live.in_place(name)) is not None:
            return live
        if name not in self._apart:
            spec = self._specs[name]
            self._apart[name] = torch.zeros(spec.num_elements, dtype=torch_dtype(spec.dtype))
        return self._apart[name]

    def _count(self, piece: Piece) -> None:
        self._arrived += 1
        for copy in piece.copies:
            name = copy.target_buffer
            self._have[name] += prod(copy.shape)
            if self._have[name] == self._need[name] and name in self._apart:
                self._complete.append((name, self._apart.pop(name)))

    def _mark(self) -> torch.cuda.Event | None:
        found = (self._live.in_place(name) for name in self._need)
        on_gpu = next((tensor for tensor in found if tensor is not None and tensor.is_cuda), None)
        if on_gpu is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(on_gpu.device))
        return event
