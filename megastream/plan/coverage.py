"""The proof that a plan writes every target element exactly once, from the right place.

It reads finished pieces and the two layouts only: offsets are turned back into tensor coordinates on both sides, so
that a fault in joining, choosing, cutting or ordering shows here, by name, before a byte moves. Every copy is followed;
only the question whether the boxes written to one shard are disjoint is asked once for shards that are cut alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np

from megastream.layout.box import Box
from megastream.layout.columns import Ints, expand
from megastream.layout.shard import RankLayout, Shard, Side
from megastream.plan.pieces import PieceTable, piece_table
from megastream.plan.table import ShardTable, Tables, runs, tables
from megastream.plan.types import Piece


class CoverageError(ValueError):
    """A plan that would leave an element out, write one twice, or take one from the wrong place."""


def prove_coverage(pieces: Iterable[Piece], trainer: Sequence[RankLayout], engine: Sequence[RankLayout]) -> None:
    """`prove` for pieces that are listed one by one."""
    specs = {spec.name: spec for layout in (*trainer, *engine) for spec in layout.tensors}
    by_rank = attrgetter("rank")
    both = tables(sorted(trainer, key=by_rank), sorted(engine, key=by_rank), specs.values())
    prove(piece_table(pieces, both))


def prove(pieces: PieceTable, own: tuple[Side, int] | None = None) -> None:
    """CoverageError names the tensor, the rank and both numbers of the first fault. `own`: only what one rank sends, or
    receives, is looked at; that its shards are written once can be told on the receiving side alone."""
    both, (piece, row) = pieces.tables, _copies_of(pieces, own)
    tensor, shape, *ends = (column[row] for column in pieces.copies.columns)
    source, source_lo = _locate(both, both.source, pieces.buffer[piece], tensor, shape, *ends[:2])
    target_buffer = ends[2]
    target, target_lo = _locate(both, both.target, target_buffer, tensor, shape, *ends[3:])
    target = np.where(both.target.buffer_rank[target_buffer] == pieces.target[piece], target, -1)
    wrong = (source < 0) | (target < 0) | (source_lo != target_lo).any(axis=1)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        shards, corners = (int(source[at]), int(target[at])), (source_lo[at], target_lo[at])
        _refuse(pieces, int(row[at]), int(piece[at]), shards, corners)
    if own is None:
        _check_exactly_once(both, target, target_lo, target_lo + shape, np.arange(len(both.target)))
    elif own[0] == "engine":
        shards_of_rank = np.flatnonzero(both.target.rank == own[1])
        _check_exactly_once(both, target, target_lo, target_lo + shape, shards_of_rank)


def _copies_of(pieces: PieceTable, own: tuple[Side, int] | None) -> tuple[Ints, Ints]:
    """(piece, row) of the copies of one rank, or of all."""
    if own is None:
        seqs = np.arange(len(pieces))
    else:
        seqs = np.flatnonzero((pieces.source if own[0] == "trainer" else pieces.target) == own[1])
    piece, row = expand(pieces.first[seqs], pieces.num_copies[seqs])
    return seqs[piece], row


def _locate(
    both: Tables, side: ShardTable, buffer: Ints, tensor: Ints, shape: Ints, offset: Ints, strides: Ints
) -> tuple[Ints, Ints]:
    """The shard that holds each copy on one side (-1: none), and the tensor coordinates of its first element.

    Several shards of a tensor may lie in one buffer; a copy is looked for in those that begin before it, from behind.
    """
    num_tensors = len(both.tensors)
    asked = np.zeros(len(side.buffers), dtype=bool)
    asked[buffer] = True
    order = np.flatnonzero(asked[side.buffer])
    order = order[np.lexsort((side.offset[order], side.buffer[order] * num_tensors + side.tensor[order]))]
    place = (side.buffer * num_tensors + side.tensor)[order]
    wanted = np.where((buffer < 0) | (tensor < 0), -1, buffer * num_tensors + tensor)
    start = np.searchsorted(place, wanted)
    # The last shard of the place that begins at or before the copy: offsets count within places.
    base = int(max(side.offset.max(initial=0), offset.max(initial=0))) + 2
    ordinal = np.cumsum(np.append(0, place[1:] != place[:-1])) if len(place) else place
    known = np.where((start < len(place)) & (place[np.minimum(start, len(place) - 1)] == wanted), start, -1)
    rank = np.where(known >= 0, ordinal[known], -1)
    at = np.searchsorted(ordinal * base + side.offset[order], rank * base + offset, side="right") - 1
    found, lo = np.full(len(wanted), -1, dtype=np.int64), np.zeros_like(shape)
    open_rows = np.flatnonzero((known >= 0) & (at >= known))
    while len(open_rows):
        rows = order[at[open_rows]]
        coordinates, fits = _coordinates(both, side, rows, offset[open_rows], shape[open_rows])
        fits &= strides[open_rows] == side.strides[rows]
        hits = open_rows[fits]
        found[hits], lo[hits] = rows[fits], coordinates[fits]
        at[open_rows] -= 1
        open_rows = open_rows[~fits]
        open_rows = open_rows[at[open_rows] >= known[open_rows]]
    return found, lo


def _coordinates(both: Tables, side: ShardTable, rows: Ints, offset: Ints, shape: Ints) -> tuple[Ints, Ints]:
    """Tensor coordinates of a buffer element in each shard, and whether a copy of `shape` from there lies in it."""
    geometry = both.geometry
    steps, lo, hi = (
        part for part in (geometry.steps[side.strides[rows]], geometry.lo[side.box[rows]], geometry.hi[side.box[rows]])
    )
    extent = hi - lo
    # The longest stride first; of equal ones that of a dim with more than one element.
    order = np.lexsort((-extent, -steps), axis=1)
    rest, place = offset - side.offset[rows], np.zeros_like(lo)
    index = np.arange(len(rows))
    for position in range(order.shape[1]):
        dim = order[:, position]
        place[index, dim], rest = np.divmod(rest, steps[index, dim])
    fits = (rest == 0) & (place >= 0).all(axis=1) & (place + shape <= extent).all(axis=1)
    return lo + place, fits


def _refuse(pieces: PieceTable, row: int, seq: int, shards: tuple[int, int], corners: tuple[Ints, Ints]) -> None:
    (copy_at, piece) = row - int(pieces.first[seq]), pieces[seq]
    copy = piece.copies[copy_at]
    for side, rank, shard, offset in (
        ("trainer", piece.source, shards[0], copy.source_offset),
        ("engine", piece.target, shards[1], copy.target_offset),
    ):
        if shard < 0:
            raise CoverageError(
                f"{copy.tensor}: piece {seq} touches {copy.shape} elements at {offset}, "
                f"where {side} rank {rank} has none of that tensor"
            )
    (a, b), dims = (tuple(corner.tolist()) for corner in corners), len(copy.shape)
    ends = [tuple(x + n for x, n in zip(corner, copy.shape, strict=False)) for corner in (a, b)]
    raise CoverageError(
        f"{copy.tensor}: piece {seq} takes {a[:dims]} to {ends[0]} from trainer rank "
        f"{piece.source} and writes it as {b[:dims]} to {ends[1]} on engine rank {piece.target}"
    )


def _check_exactly_once(both: Tables, shard: Ints, lo: Ints, hi: Ints, shards: Ints) -> None:
    """Disjoint boxes inside each of the `shards` whose volumes add up to it cover it exactly once."""
    side, size = both.target, both.geometry.volume[both.target.box]
    order = np.lexsort((*lo.T[::-1], shard))
    start, length = runs(shard[order])
    boxes = np.concatenate((lo, hi), axis=1)[order]
    fine: set[bytes] = set()
    for begin, count in zip(start[length > 1].tolist(), length[length > 1].tolist(), strict=True):
        key = boxes[begin : begin + count].tobytes()
        if key not in fine:
            _check_disjoint(side.shard(int(shard[order[begin]])), boxes[begin : begin + count])
            fine.add(key)
    written = np.bincount(shard, (hi - lo).prod(axis=1), len(side)).astype(np.int64)
    for row in shards[written[shards] != size[shards]][:1].tolist():
        missed = side.shard(row)
        where = f"{missed.tensor}: {missed.buffer} on engine rank {missed.rank}"
        raise CoverageError(f"{where} gets {written[row]} of {size[row]} elements")


def _check_disjoint(shard: Shard, corners: Ints) -> None:
    where = f"{shard.tensor}: {shard.buffer} on engine rank {shard.rank}"
    width = corners.shape[1] // 2
    open_boxes: list[Box] = []
    for row in corners.tolist():
        box = Box(tuple(row[:width]), tuple(row[width:]))
        open_boxes = [other for other in open_boxes if other.hi[0] > box.lo[0]]
        for other in open_boxes:
            common = box.intersect(other)
            if common is not None:
                raise CoverageError(f"{where} gets {common.volume} elements twice, from {common.lo} to {common.hi}")
        open_boxes.append(box)
