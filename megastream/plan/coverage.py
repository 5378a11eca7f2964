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
from megastream.layout.columns import Ints, expand, packed
from megastream.layout.shard import RankLayout, Shard, Side
from megastream.plan.names import join_names
from megastream.plan.pieces import PieceTable, piece_table
from megastream.plan.table import ShardTable, Tables, alike, padded, runs, tables
from megastream.plan.types import Piece


class CoverageError(ValueError):
    """A plan that would leave an element out, write one twice, or take one from the wrong place."""


def prove_coverage(pieces: Iterable[Piece], trainer: Sequence[RankLayout], engine: Sequence[RankLayout]) -> None:
    """`prove` for pieces that are listed one by one."""
    trainer, engine = (sorted(layouts, key=attrgetter("rank")) for layouts in (trainer, engine))
    prove(piece_table(pieces, tables(trainer, engine, join_names((*trainer, *engine)))))


def prove(pieces: PieceTable, own: tuple[Side, int] | None = None) -> None:
    """CoverageError names the tensor, the rank and both numbers of the first fault. `own`: only what one rank sends, or
    receives, is looked at; that its shards are written once can be told on the receiving side alone."""
    both, (piece, row) = pieces.tables, _copies_of(pieces, own)
    tensor, shape, *ends = (column[row] for column in pieces.copies.columns)
    extent = padded(pieces.copies.shapes, both.geometry.width, 1).take(shape, axis=1)
    source, source_lo = _locate(both, both.source, pieces.buffer[piece], tensor, extent, *ends[:2])
    target_buffer = ends[2]
    target, target_lo = _locate(both, both.target, target_buffer, tensor, extent, *ends[3:])
    target[both.target.buffer_rank[target_buffer] != pieces.target[piece]] = -1
    wrong = (source < 0) | (target < 0) | (source_lo != target_lo).any(axis=0)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        shards, corners = (int(source[at]), int(target[at])), (source_lo[:, at], target_lo[:, at])
        _refuse(pieces, int(row[at]), int(piece[at]), shards, corners)
    if own is None:
        _check_exactly_once(both, target, target_lo, target_lo + extent, np.arange(len(both.target)))
    elif own[0] == "engine":
        shards_of_rank = np.flatnonzero(both.target.rank == own[1])
        _check_exactly_once(both, target, target_lo, target_lo + extent, shards_of_rank)


def _copies_of(pieces: PieceTable, own: tuple[Side, int] | None) -> tuple[Ints, Ints]:
    """(piece, row) of the copies of one rank, or of all."""
    if own is None:
        seqs = np.arange(len(pieces))
    else:
        seqs = np.flatnonzero((pieces.source if own[0] == "trainer" else pieces.target) == own[1])
    piece, row = expand(pieces.first[seqs], pieces.num_copies[seqs])
    return seqs[piece], row


def _locate(
    both: Tables, side: ShardTable, buffer: Ints, tensor: Ints, extent: Ints, offset: Ints, strides: Ints
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
    first, length = runs(place)
    number = np.searchsorted(place[first], wanted)
    known = np.append(place[first], -2)[number] == wanted
    begin = np.append(first, len(place))[number]
    # The last shard of the place that begins at or before the copy: offsets count within places.
    base = int(max(side.offset.max(initial=0), offset.max(initial=0))) + 2
    ordinal = np.repeat(np.arange(len(first)), length)
    at = np.searchsorted(ordinal * base + side.offset[order], number * base + offset, side="right") - 1
    found, lo = np.full(len(wanted), -1, dtype=np.int64), np.zeros_like(extent)
    open_rows = np.flatnonzero(known & (at >= begin))
    while len(open_rows):
        rows = order[at[open_rows]]
        coordinates, fits = _coordinates(both, side, rows, offset[open_rows], extent[:, open_rows])
        fits &= strides[open_rows] == side.strides[rows]
        hits = open_rows[fits]
        found[hits], lo[:, hits] = rows[fits], coordinates[:, fits]
        open_rows = open_rows[~fits]
        at[open_rows] -= 1
        open_rows = open_rows[at[open_rows] >= begin[open_rows]]
    return found, lo


def _coordinates(both: Tables, side: ShardTable, rows: Ints, offset: Ints, extent: Ints) -> tuple[Ints, Ints]:
    """Tensor coordinates of a buffer element in each shard, and whether a copy of `extent` from there lies in it."""
    geometry, num_strides = both.geometry, len(both.geometry.strides)
    keys = side.box[rows] * num_strides + side.strides[rows]
    kinds = np.unique(keys)
    kind = np.searchsorted(kinds, keys)
    box, steps = kinds // num_strides, geometry.steps[:, kinds % num_strides]
    lo, room = geometry.lo[:, box], (geometry.hi - geometry.lo)[:, box]
    # The longest stride first; of equal ones that of a dim with more than one element.
    order = np.lexsort((-room, -steps), axis=0)
    steps = np.take_along_axis(steps, order, axis=0)
    rest, place, index = offset - side.offset[rows], np.zeros_like(extent), np.arange(len(rows))
    for dims, step in zip(order, steps, strict=True):
        place[dims[kind], index], rest = np.divmod(rest, step[kind])
    fits = rest == 0
    for at, size, most in zip(place, extent, room, strict=True):
        fits &= (at >= 0) & (at + size <= most[kind])
    return place + lo.take(kind, axis=1), fits


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
    order = np.argsort(packed(shard, *lo), kind="stable")
    start, length = runs(shard[order])
    several = np.flatnonzero(length > 1)
    # Shards to which the same boxes are written are looked at once.
    _, first = alike(packed(*lo, *hi)[order], start[several], length[several])
    for at in several[first].tolist():
        rows = order[start[at] : start[at] + length[at]]
        _check_disjoint(side.shard(int(shard[rows[0]])), lo[:, rows], hi[:, rows])
    written = np.bincount(shard, (hi - lo).prod(axis=0), len(side)).astype(np.int64)
    for row in shards[written[shards] != size[shards]][:1].tolist():
        missed = side.shard(row)
        where = f"{missed.tensor}: {missed.buffer} on engine rank {missed.rank}"
        raise CoverageError(f"{where} gets {written[row]} of {size[row]} elements")


def _check_disjoint(shard: Shard, lo: Ints, hi: Ints) -> None:
    """Boxes whose lower corners ascend share no element."""
    where = f"{shard.tensor}: {shard.buffer} on engine rank {shard.rank}"
    open_boxes: list[Box] = []
    for corners in zip(lo.T.tolist(), hi.T.tolist(), strict=True):
        box = Box(*map(tuple, corners))
        open_boxes = [other for other in open_boxes if other.hi[0] > box.lo[0]]
        for other in open_boxes:
            common = box.intersect(other)
            if common is not None:
                raise CoverageError(f"{where} gets {common.volume} elements twice, from {common.lo} to {common.hi}")
        open_boxes.append(box)
