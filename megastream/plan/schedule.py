"""Cuts moves into pieces and puts them in the order in which a trainer rank emits them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megastream.layout.box import Box
from megastream.layout.columns import Ints, expand, ints, packed
from megastream.layout.pack import item_bytes
from megastream.plan.check import transform_between
from megastream.plan.pieces import CopyTable, PieceTable
from megastream.plan.reshard import Moves
from megastream.plan.table import ShardTable, Tables, runs
from megastream.plan.unit import unit_order


def schedule(moves: Moves, both: Tables, piece_bytes: int) -> PieceTable:
    """Pieces of at most `piece_bytes`, one per source buffer, unit and target at least.

    Order: by source rank, then as its buffers become final, then by unit and target. ValueError names a dtype pair
    that is refused, or a `piece_bytes` that holds no element.
    """
    _check_dtypes(moves, both, piece_bytes)
    units = sorted(moves.units, key=unit_order)
    rank_of_unit = ints(map({unit: rank for rank, unit in enumerate(units)}.__getitem__, moves.units))
    source_buffer = both.source.buffer[moves.source]
    target_buffer = both.target.buffer[moves.target]
    # By dtype last; a source buffer's number goes by its rank first, then by the order in which buffers become final.
    dtype = both.target.buffer_dtype[target_buffer]
    unit, target = rank_of_unit[moves.unit], both.target.rank[moves.target]
    order = np.argsort(packed(source_buffer, unit, target, dtype), kind="stable")
    group = _numbered(source_buffer[order], unit[order], target[order], dtype[order])
    item = ints(item_bytes(name) for name in both.dtypes)
    most = (piece_bytes // item)[dtype[order]]
    rows, lo, hi = _split_all(moves.lo[order], moves.hi[order], most, both)
    volume = (hi - lo).prod(axis=1)
    piece = _fill(volume, group[rows], most[rows])
    rows = order[rows]
    first, _ = runs(piece)
    at = rows[first]
    num_elements = np.add.reduceat(volume, first) if len(first) else ints(())
    return PieceTable(
        tables=both,
        copies=_copies(moves, both, rows, lo, hi),
        first=np.append(first, len(rows)),
        buffer=source_buffer[at],
        target=target[at],
        unit=unit[at],
        dtype=dtype[at],
        num_elements=num_elements,
        num_bytes=num_elements * item[dtype[at]],
        units=tuple(map(str, units)),
        dtypes=both.dtypes,
    )


def _check_dtypes(moves: Moves, both: Tables, piece_bytes: int) -> None:
    num, source, target = len(both.dtypes), both.source, both.target
    pairs = source.buffer_dtype[source.buffer[moves.source]] * num + target.buffer_dtype[target.buffer[moves.target]]
    keys, first = np.unique(pairs, return_index=True)
    for row, key in sorted(zip(first.tolist(), keys.tolist(), strict=True)):
        source_dtype, target_dtype = both.dtypes[key // num], both.dtypes[key % num]
        if item_bytes(target_dtype) > piece_bytes:
            raise ValueError(
                f"piece_bytes is {piece_bytes}; one {target_dtype} element takes {item_bytes(target_dtype)}"
            )
        transform_between(target.shard(int(moves.target[row])).tensor, source_dtype, target_dtype)


def _numbered(*keys: Ints) -> Ints:
    """Rows with equal keys stand together; the number of each such run."""
    change = np.zeros(len(keys[0]), dtype=bool)
    for key in keys:
        change[1:] |= key[1:] != key[:-1]
    return np.cumsum(change).astype(np.int64)


def _split_all(lo: Ints, hi: Ints, most: Ints, both: Tables) -> tuple[Ints, Ints, Ints]:
    """(row, lo, hi) with every box that is larger than `most` elements cut up; equal boxes are cut once."""
    large = np.flatnonzero((hi - lo).prod(axis=1) > most)
    if not len(large):
        return np.arange(len(lo)), lo, hi
    known: dict[tuple[bytes, int], list[Box]] = {}
    count, cuts = np.ones(len(lo), dtype=np.int64), []
    for row in large.tolist():
        key = lo[row].tobytes() + hi[row].tobytes(), int(most[row])
        if key not in known:
            known[key] = list(_split(Box(tuple(lo[row].tolist()), tuple(hi[row].tolist())), key[1]))
        count[row] = len(known[key])
        cuts.append((row, known[key]))
    rows, part = expand(np.zeros(len(lo), dtype=np.int64), count)
    new_lo, new_hi = lo[rows], hi[rows]
    start = np.cumsum(count) - count
    for row, boxes in cuts:
        here = slice(start[row], start[row] + len(boxes))
        new_lo[here], new_hi[here] = [box.lo for box in boxes], [box.hi for box in boxes]
    return rows, new_lo, new_hi


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


def _fill(volume: Ints, group: Ints, most: Ints) -> Ints:
    """The piece of every copy: pieces are filled in order, up to `most` elements, and never reach across groups."""
    start, length = runs(group)
    total = np.add.reduceat(volume, start) if len(start) else ints(())
    new = np.zeros(len(volume), dtype=np.int64)
    new[start] = 1
    for index in np.flatnonzero(total > most[start]).tolist():
        begin, limit = int(start[index]), int(most[start[index]])
        room = limit
        for row, size in enumerate(volume[begin : begin + length[index]].tolist(), begin):
            if size > room:
                new[row], room = 1, limit
            room -= size
    return np.cumsum(new) - 1


def _copies(moves: Moves, both: Tables, rows: Ints, lo: Ints, hi: Ints) -> CopyTable:
    source, target = moves.source[rows], moves.target[rows]
    return CopyTable(
        tensor=both.target.tensor[target],
        shape=hi - lo,
        source_offset=_offsets(both, both.source, source, lo),
        source_strides=both.source.strides[source],
        target_buffer=both.target.buffer[target],
        target_offset=_offsets(both, both.target, target, lo),
        target_strides=both.target.strides[target],
    )


def _offsets(both: Tables, side: ShardTable, rows: Ints, lo: Ints) -> Ints:
    """Where coordinate `lo` of each shard's tensor lies in its buffer."""
    inside = lo - both.geometry.lo[side.box[rows]]
    steps = both.geometry.steps[side.strides[rows]]
    found: Ints = side.offset[rows] + (inside * steps).sum(axis=1)
    return found
