"""What the emitter hands around: a piece on its way, the report of a version, and what the lanes counted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from megastream.plan.types import Piece
from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import SendLane

MakeHeader = Callable[[Piece, int, int, int], PieceHeader]
"""(piece, version, attempt, checksum) -> header."""

Traffic = tuple[int, int, int]
"""(pieces, payload bytes, header bytes)."""

Still = Callable[[], object] | None
"""Told that a wait goes on because something was acknowledged."""


class EmitError(RuntimeError):
    """Pieces cannot go out: a lane failed, a deadline passed, or calls came in the wrong order."""


@dataclass(frozen=True, slots=True)
class EmitReport:
    """What left this rank for one (version, attempt) and was acknowledged, counted at the lanes.

    `wire_bytes` is payload plus headers; `elements` is each acknowledged payload in elements of its dtype. `wait_s` is
    the time the packing thread waited for a free slot (backpressure). `withdrawn`: the rest of it never leaves.
    """

    version: int
    attempt: int
    pieces: int
    payload_bytes: int
    wire_bytes: int
    elements: int
    wait_s: float
    withdrawn: bool = False

    @classmethod
    def counted(
        cls, version: int, attempt: int, before: Traffic, now: Traffic, elements: int, wait_s: float, withdrawn: bool
    ) -> EmitReport:
        """From what the lanes counted between the two; nothing of it is read from the plan."""
        pieces, payload_bytes, header_bytes = (after - earlier for earlier, after in zip(before, now, strict=True))
        wire_bytes = payload_bytes + header_bytes
        return cls(version, attempt, pieces, payload_bytes, wire_bytes, elements, wait_s, withdrawn)


@dataclass(frozen=True, slots=True)
class Filled:
    """A packed piece on its way to a lane. On a GPU its bytes are there once `checksum` has returned."""

    piece: Piece
    slot: torch.Tensor
    payload: torch.Tensor
    """The part of the slot that the piece takes."""
    checksum: Callable[[], int]
    make_header: Callable[[int], PieceHeader]

    def header(self) -> PieceHeader:
        """Blocks until the checksum is known."""
        return self.make_header(self.checksum())


def traffic(lanes: Mapping[int, SendLane]) -> Traffic:
    """What went through the lanes of a rank since they opened."""
    counters = [lane.counters for lane in lanes.values()]
    return (
        sum(each.pieces for each in counters),
        sum(each.payload_bytes for each in counters),
        sum(each.header_bytes for each in counters),
    )


def by_buffer(
    pieces: Iterable[Piece], buffers: Mapping[str, torch.Tensor], lanes: Mapping[int, SendLane], rank: int
) -> dict[str, list[Piece]]:
    """A rank's pieces by the bucket that they are cut from. EmitError when bucket or lane of a piece is not there."""
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.source_buffer not in buffers:
            raise EmitError(f"rank {rank}: the plan sends {piece.source_buffer}, which this rank does not hold")
        if piece.target not in lanes:
            raise EmitError(f"rank {rank}: the plan sends to engine rank {piece.target}, but there is no lane to it")
        groups.setdefault(piece.source_buffer, []).append(piece)
    return groups


def slot_sizes(groups: Iterable[list[Piece]], targets: Collection[int], most: int) -> dict[int, list[int]]:
    """Bytes of each slot by target: as large as its largest piece, and `most` at most, or as many as it has pieces."""
    sizes: dict[int, list[int]] = {target: [] for target in targets}
    for group in groups:
        for piece in group:
            sizes[piece.target].append(piece.num_bytes)
    return {target: [max(each)] * min(most, len(each)) if each else [] for target, each in sizes.items()}
