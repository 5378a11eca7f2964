"""The shards of one side as columns of numbers: what the planner computes with.

A model has tens of thousands of tensors and a layout hundreds of thousands of shards, but only a handful of different
boxes and strides: layers that are alike repeat them. So boxes and strides are numbered once for both sides, a shard is
a row of numbers, and whatever depends on geometry alone is worked out once for each kind of row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megastream.layout.box import Box
from megastream.layout.columns import Ints, Numbered, columns_of, ints, packed
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec
from megastream.plan.names import Names


@dataclass(frozen=True)
class Geometry:
    """The boxes and strides that occur on either side. `lo[d]` is dim d of all boxes, `steps[d]` of all strides; each
    has `width` dims, missing ones of extent 1."""

    boxes: tuple[Box, ...]
    strides: tuple[tuple[int, ...], ...]
    lo: Ints
    hi: Ints
    steps: Ints
    volume: Ints

    @property
    def width(self) -> int:
        return len(self.lo)

    def reach(self, box: Ints, strides: Ints) -> Ints:
        """How far the last element of each box lies behind its first one."""
        found: Ints = ((self.hi - self.lo - 1)[:, box] * self.steps[:, strides]).sum(axis=0)
        return found


@dataclass(frozen=True)
class ShardTable:
    """One row per shard of a side, by rank and then in the order of the rank's layout.

    `tensor` counts in the plan's tensors, `buffer` in `buffers` (all ranks' buffers, by rank), `box` and `strides` in
    the geometry; -1 stands for a name that no layout describes. Rows of layout i are `first[i]` to `first[i + 1]`.
    `described` and `described_rank` list which rank's layout names which tensor.
    """

    layouts: tuple[RankLayout, ...]
    first: Ints
    rank: Ints
    tensor: Ints
    box: Ints
    buffer: Ints
    offset: Ints
    strides: Ints
    buffers: tuple[BufferSpec, ...]
    buffer_rank: Ints
    buffer_size: Ints
    buffer_dtype: Ints
    described: Ints
    described_rank: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def shard(self, row: int) -> Shard:
        """The shard of a row as its layout has it."""
        number = int(np.searchsorted(self.first, row, side="right")) - 1
        return self.layouts[number].shards[row - int(self.first[number])]

    def buffer_numbers(self) -> dict[tuple[int, str], int]:
        """(rank, name) of every buffer, with its number."""
        ranks = self.buffer_rank.tolist()
        return {(rank, spec.name): number for number, (rank, spec) in enumerate(zip(ranks, self.buffers, strict=True))}


@dataclass(frozen=True)
class Tables:
    """Both sides of a plan. `tensors` are numbered as they stand here, dtypes of buffers by name; `shape[d]` is dim d
    of all tensors, and there are as many dims as the geometry has."""

    tensors: tuple[TensorSpec, ...]
    dtypes: tuple[str, ...]
    shape: Ints
    num_dims: Ints
    geometry: Geometry
    source: ShardTable
    target: ShardTable


def tables(trainer: Sequence[RankLayout], engine: Sequence[RankLayout], names: Names) -> Tables:
    """Both sides as columns. Layouts come sorted by rank."""
    boxes, strides = Numbered[Box](), Numbered[tuple[int, ...]]()
    buffers = {id(layout.buffers): layout.buffers for layout in (*trainer, *engine)}
    dtypes = tuple(sorted({spec.dtype for specs in buffers.values() for spec in specs}))
    source = _side(trainer, names, dtypes, boxes, strides)
    target = _side(engine, names, dtypes, boxes, strides)
    found, steps = boxes.items, strides.items
    width = max(1, *(len(box.lo) for box in found), *map(len, steps), *map(len, names.shapes))
    lo, hi = padded([box.lo for box in found], width, 0), padded([box.hi for box in found], width, 1)
    geometry = Geometry(tuple(found), tuple(steps), lo, hi, padded(steps, width, 1), (hi - lo).prod(axis=0))
    shape, num_dims = padded(names.shapes, width, 1)[:, names.shape], ints(map(len, names.shapes))[names.shape]
    return Tables(names.tensors, dtypes, shape, num_dims, geometry, source, target)


def padded(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> Ints:
    """Tuples of up to `width` numbers as `width` columns: number d of all tuples stands in row d."""
    filled = [row + (fill,) * (width - len(row)) for row in rows]
    return np.ascontiguousarray(np.array(filled, dtype=np.int64).reshape(len(rows), width).T)


def runs(keys: Ints) -> tuple[Ints, Ints]:
    """(start, length) of each run of equal keys."""
    if not len(keys):
        return ints(()), ints(())
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))).astype(np.int64)
    return starts, np.diff(np.append(starts, len(keys)))


def alike(values: Ints, start: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Numbers stretches of `values`, none negative, so that equal ones have one number: the number of each, and of
    each number the first stretch that has it. Stretch i is `values[start[i] : start[i] + length[i]]`."""
    number, most = np.zeros(len(start), dtype=np.int64), 0
    unread = np.flatnonzero(length > 0)
    # A stretch is what came before, which has a number already, and one value more.
    for read in range(int(length.max(initial=0))):
        keys = packed(number[unread], values[start[unread] + read])
        number[unread] = most + 1 + np.unique(keys, return_inverse=True)[1]
        most, unread = int(number[unread].max()), unread[length[unread] > read + 1]
    _, first, number = np.unique(number, return_index=True, return_inverse=True)
    return number, first


def _side(
    layouts: Sequence[RankLayout],
    names: Names,
    dtypes: Sequence[str],
    boxes: Numbered[Box],
    strides: Numbered[tuple[int, ...]],
) -> ShardTable:
    held, described = [columns_of(layout) for layout in layouts], [names.of(layout) for layout in layouts]
    num_buffers, num_shards = ints(len(layout.buffers) for layout in layouts), ints(map(len, held))
    rank, known = ints(layout.rank for layout in layouts), Numbered(dtypes)
    # Ranks that are alike have one tuple of buffers.
    buffers = {id(layout.buffers): layout.buffers for layout in layouts}
    sizes = {key: ints([spec.num_elements for spec in specs]) for key, specs in buffers.items()}
    types = {key: ints(known.numbers([spec.dtype for spec in specs])) for key, specs in buffers.items()}

    def column(parts: Iterable[Ints]) -> Ints:
        return np.concatenate([ints(()), *parts])

    return ShardTable(
        layouts=tuple(layouts),
        first=np.append(0, np.cumsum(num_shards)),
        rank=np.repeat(rank, num_shards),
        # Number -1, a name that no layout describes, stays -1.
        tensor=column(np.append(numbers, -1)[each.tensor] for numbers, each in zip(described, held, strict=True)),
        box=column(ints(boxes.numbers(each.boxes))[each.box] for each in held),
        buffer=column(
            np.where(each.buffer < 0, -1, each.buffer + start)
            for each, start in zip(held, np.cumsum(num_buffers) - num_buffers, strict=True)
        ),
        offset=column(each.offset for each in held),
        strides=column(ints(strides.numbers(each.steps))[each.strides] for each in held),
        buffers=tuple(chain.from_iterable(layout.buffers for layout in layouts)),
        buffer_rank=np.repeat(rank, num_buffers),
        buffer_size=column(sizes[id(layout.buffers)] for layout in layouts),
        buffer_dtype=column(types[id(layout.buffers)] for layout in layouts),
        described=column(described),
        described_rank=np.repeat(rank, [len(layout.tensors) for layout in layouts]),
    )
