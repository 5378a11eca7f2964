"""An emitter over lanes that a test holds in its hand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

import torch

from megastream.plan.types import Copy, Listed, Piece, Plan
from megastream.protocol.header import HEADER_BYTES, PieceHeader
from megastream.protocol.lane import LaneCounters, LaneError
from megastream.trainer.emit import Emitter
from megastream.transport.checksum import checksum

RANK = 3


class FakeLane:
    """Keeps what it is given. `fail_at` refuses the piece with that seq.

    `gate` holds acknowledgements back until it is set; `one_more` lets one through.

    `short`: bytes of each piece that never left, by the lane's own count.
    """

    device = "cpu"

    def __init__(self, *, open_gate: bool = True, fail_at: int | None = None, short: int = 0, window: int = 1) -> None:
        self.counters, self.sent, self.closed, self.fail_at = LaneCounters(), [], 0, fail_at
        self.window = window
        self.gate, self.short, self.asked = threading.Event(), short, 0
        self.one_more = threading.Semaphore(0)
        self.posted: deque[tuple[PieceHeader, torch.Tensor]] = deque()
        if open_gate:
            self.gate.set()

    def checksum(self, payload: torch.Tensor, stream: Any = None) -> Callable[[], int]:
        return partial(checksum, payload)

    def post(self, header: PieceHeader, payload: torch.Tensor, deadline_s: float) -> None:
        self.asked += 1
        self.posted.append((header, payload))
        assert len(self.posted) <= self.window

    def acknowledged(self, deadline_s: float) -> None:
        until = monotonic() + 10
        while not (self.gate.wait(0.01) or self.one_more.acquire(blocking=False)):
            assert monotonic() < until
        header, payload = self.posted.popleft()
        if header.seq == self.fail_at:
            raise LaneError(f"engine rank {header.target} refused piece {header.seq}: no room")
        assert payload.dtype == torch.uint8 and payload.dim() == 1 and payload.is_contiguous()
        self.counters.pieces += 1
        self.counters.payload_bytes += payload.numel() - self.short
        self.counters.header_bytes += HEADER_BYTES
        self.sent.append((header, payload.clone()))

    def close(self) -> None:
        self.closed += 1


def piece(seq: int, target: int, buffer: str, *copies: Copy, dtype: str = "float32") -> Piece:
    elements = sum(torch.Size(copy.shape).numel() for copy in copies)
    size = elements * getattr(torch, dtype).itemsize
    transform = "none" if dtype == "float32" else "cast"
    return Piece(seq, RANK, target, buffer, "s0.l0.dense", dtype, transform, elements, size, copies)


def rows(shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Copy:
    return Copy("t", shape, offset, strides, "live", 0, strides)


def header_for(piece: Piece, version: int, attempt: int, checksum: int) -> PieceHeader:
    return PieceHeader(
        kind="piece",
        run_id="run",
        incarnation=1,
        attachment="a",
        version=version,
        attempt=attempt,
        unit=piece.unit,
        plan_digest="d",
        source=piece.source,
        target=piece.target,
        seq=piece.seq,
        num_bytes=piece.num_bytes,
        checksum=checksum,
    )


# Two buckets of 24 elements. Of `one`, rows go to engine rank 0 and a column block to 1; all of `two` goes to 0.
PIECES = (
    piece(0, 0, "one", rows((2, 4), 0, (4, 1)), rows((1, 4), 12, (4, 1))),
    piece(1, 1, "one", rows((3, 2), 1, (4, 1))),
    piece(2, 0, "two", rows((24,), 0, (1,)), dtype="bfloat16"),
)


def plan(pieces: tuple[Piece, ...] = PIECES) -> Plan:
    return Plan("d", "stream", 4, 2, Listed(pieces), ("s0.l0.dense",), {}, {}, {})


def buffers() -> dict[str, torch.Tensor]:
    # The second one starts in the middle of its storage, as a bucket does.
    return {"one": torch.arange(24.0), "two": torch.arange(100.0)[50:74]}


@contextmanager
def emitter(lanes: dict[int, FakeLane], **settings: Any) -> Iterator[Emitter]:
    made = Emitter(
        settings.pop("plan", plan()),
        RANK,
        settings.pop("buffers", buffers()),
        lanes,  # type: ignore[arg-type]
        header_for,
        slots_per_target=settings.pop("slots", 2),
        deadline_s=settings.pop("deadline_s", 5.0),
    )
    try:
        yield made
    finally:
        for lane in lanes.values():
            lane.gate.set()
        made.close()
        made.close()
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("emit-")] == []
        assert all(lane.closed for lane in lanes.values())


def many(count: int) -> tuple[Piece, ...]:
    return tuple(piece(seq, 0, "one", rows((4,), 4 * seq, (1,))) for seq in range(count))
