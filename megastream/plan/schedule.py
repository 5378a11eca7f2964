"""Cuts moves into pieces and puts them in the order in which a trainer rank emits them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megastream.layout.box import Box
from megastream.layout.columns import Ints, Numbered, expand, ints, packed
from megastream.layout.pack import item_bytes
from megastream.plan.check import transform_between
from megastream.plan.pieces import CopyTable, PieceTable
from megastream.plan.reshard import Moves
from megastream.plan.table import ShardTable, Tables, padded, runs
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
    keys = packed(source_buffer, unit, target, dtype)
    order = np.argsort(keys, kind="stable")
    item = ints(item_bytes(name) for name in both.dtypes)
    row, part, boxes = _split_all(moves.box[order], dtype[order], piece_bytes // item, moves.boxes)
    rows = order[row]
    volume = ints(box.volume for box in boxes)[part]
    first = _fill(volume, keys[rows], (piece_bytes // item)[dtype[rows]])
    at = rows[first]
    num_elements = np.add.reduceat(volume, first) if len(first) else ints(())
    return PieceTable(
        tables=both,
        copies=_copies(moves, both, rows, part, boxes),
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


def _split_all(box: Ints, dtype: Ints, most: Ints, boxes: tuple[Box, ...]) -> tuple[Ints, Ints, tuple[Box, ...]]:
    """(row, part, boxes): the `boxes[part]` that each row's box becomes, none of more than `most[dtype]` elements.
    Every box is cut once for a dtype."""
    kinds, kind = np.unique(packed(box, dtype), return_index=True, return_inverse=True)[1:]
    cut = [list(_split(boxes[box[row]], int(most[dtype[row]]))) for row in kinds.tolist()]
    found = Numbered[Box]()
    number = ints(found.numbers(part for parts in cut for part in parts))
    num = ints(map(len, cut))
    row, part = expand((np.cumsum(num) - num)[kind], num[kind])
    return row, number[part], tuple(found.items)


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
    """The first row of every piece: pieces are filled in order, up to `most` elements, and never reach across rows of
    equal `group`."""
    begin, length = runs(group)
    end = begin + length
    filled = np.append(0, np.cumsum(volume))
    firsts = [begin]
    # All groups at once: each goes on behind the last row that its piece has room for.
    while len(begin):
        begin = np.searchsorted(filled, filled[begin] + most[begin], side="right") - 1
        open_groups = begin < end
        begin, end = begin[open_groups], end[open_groups]
        firsts.append(begin)
    return np.sort(np.concatenate(firsts))


def _copies(moves: Moves, both: Tables, rows: Ints, part: Ints, boxes: tuple[Box, ...]) -> CopyTable:
    source, target = moves.source[rows], moves.target[rows]
    shapes = Numbered[tuple[int, ...]]()
    shape = ints(shapes.numbers(box.shape for box in boxes))[part]
    lo = padded([box.lo for box in boxes], both.geometry.width, 0)
    return CopyTable(
        tensor=both.target.tensor[target],
        shape=shape,
        source_offset=_offsets(both, both.source, source, lo, part),
        source_strides=both.source.strides[source],
        target_buffer=both.target.buffer[target],
        target_offset=_offsets(both, both.target, target, lo, part),
        target_strides=both.target.strides[target],
        shapes=tuple(shapes.items),
    )


def _offsets(both: Tables, side: ShardTable, rows: Ints, lo: Ints, part: Ints) -> Ints:
    """Where coordinate `lo[part]` of each shard's tensor lies in its buffer."""
    geometry, box, strides = both.geometry, side.box[rows], side.strides[rows]
    found = side.offset[rows]
    for inside, begin, steps in zip(lo, geometry.lo, geometry.steps, strict=True):
        found += (inside[part] - begin[box]) * steps[strides]
    return found
