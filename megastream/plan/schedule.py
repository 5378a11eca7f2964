"""Cuts moves into pieces and puts them in the order in which a trainer rank emits them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from megastream.layout.box import Box
from megastream.layout.pack import item_bytes
from megastream.layout.shard import RankLayout, Shard
from megastream.plan.check import transform_between
from megastream.plan.reshard import Move
from megastream.plan.types import Copy, Piece
from megastream.plan.unit import unit_order

_Key = tuple[int, int, tuple[int, float, int, int, str], int, str]


def schedule(
    moves: Sequence[Move], trainer: Sequence[RankLayout], engine: Sequence[RankLayout], piece_bytes: int
) -> tuple[Piece, ...]:
    """Pieces of at most `piece_bytes`, one per source buffer, unit and target at least.

    Order: by source rank, then as its buffers become final, then by unit and target. ValueError names a dtype pair
    that is refused, or a `piece_bytes` that holds no element.
    """
    orders = {layout.rank: {spec.name: i for i, spec in enumerate(layout.buffers)} for layout in trainer}
    source_dtypes = {layout.rank: {spec.name: spec.dtype for spec in layout.buffers} for layout in trainer}
    target_dtypes = {layout.rank: {spec.name: spec.dtype for spec in layout.buffers} for layout in engine}
    groups: dict[_Key, list[Move]] = {}
    for move in moves:
        source, target = move.source, move.target
        dtype = target_dtypes[target.rank][target.buffer]
        if item_bytes(dtype) > piece_bytes:
            raise ValueError(f"piece_bytes is {piece_bytes}; one {dtype} element takes {item_bytes(dtype)}")
        transform_between(target.tensor, source_dtypes[source.rank][source.buffer], dtype)
        order = orders[source.rank][source.buffer]
        groups.setdefault((source.rank, order, unit_order(move.unit), target.rank, dtype), []).append(move)
    pieces: list[Piece] = []
    for key in sorted(groups):
        dtype = key[-1]
        first = groups[key][0]
        source_dtype = source_dtypes[first.source.rank][first.source.buffer]
        for copies in _cut(groups[key], piece_bytes // item_bytes(dtype)):
            num_elements = sum(prod(copy.shape) for copy in copies)
            pieces.append(
                Piece(
                    seq=len(pieces),
                    source=first.source.rank,
                    target=first.target.rank,
                    source_buffer=first.source.buffer,
                    unit=str(first.unit),
                    dtype=dtype,
                    transform=transform_between(first.target.tensor, source_dtype, dtype),
                    num_elements=num_elements,
                    num_bytes=num_elements * item_bytes(dtype),
                    copies=tuple(copies),
                )
            )
    return tuple(pieces)


def _cut(moves: Sequence[Move], most: int) -> Iterator[list[Copy]]:
    """Fills pieces of at most `most` elements in order; only a copy that is larger by itself is split."""
    copies: list[Copy] = []
    room = most
    for move in moves:
        for box in _split(move.box, most):
            if box.volume > room:
                yield copies
                copies, room = [], most
            copies.append(_copy(move, box))
            room -= box.volume
    if copies:
        yield copies


def _split(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements, each as many whole rows as fit, or parts of one row."""
    if box.volume <= most:
        yield box
        return
    row = box.volume // box.shape[0]
    step = max(most // row, 1)
    for lo in range(box.lo[0], box.hi[0], step):
        hi = min(lo + step, box.hi[0])
        if row <= most:
            yield Box((lo, *box.lo[1:]), (hi, *box.hi[1:]))
            continue
        for inner in _split(Box(box.lo[1:], box.hi[1:]), most):
            yield Box((lo, *inner.lo), (hi, *inner.hi))


def _copy(move: Move, box: Box) -> Copy:
    return Copy(
        tensor=move.target.tensor,
        shape=box.shape,
        source_offset=_offset(move.source, box),
        source_strides=move.source.strides,
        target_buffer=move.target.buffer,
        target_offset=_offset(move.target, box),
        target_strides=move.target.strides,
    )


def _offset(shard: Shard, box: Box) -> int:
    steps = zip(box.lo, shard.box.lo, shard.strides, strict=True)
    return shard.offset + sum((a - b) * stride for a, b, stride in steps)
