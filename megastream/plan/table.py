"""The shards of one side as columns of numbers: what the planner computes with.

A model has tens of thousands of tensors and a layout hundreds of thousands of shards, but only a handful of different
boxes and strides: layers that are alike repeat them. So boxes and strides are numbered once for both sides, a shard is
a row of numbers, and whatever depends on geometry alone is worked out once for each kind of row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megastream.layout.box import Box
from megastream.layout.columns import Ints, Numbered, columns_of, ints
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec


@dataclass(frozen=True)
class Geometry:
    """The boxes and strides that occur on either side, as rows of `width` dims; missing dims have extent 1."""

    boxes: tuple[Box, ...]
    strides: tuple[tuple[int, ...], ...]
    lo: Ints
    hi: Ints
    steps: Ints
    volume: Ints

    @property
    def width(self) -> int:
        return int(self.lo.shape[1])


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
    """Both sides of a plan. `tensors` are numbered as they stand here, dtypes of buffers by name; `shape` has the
    geometry's width."""

    tensors: tuple[TensorSpec, ...]
    dtypes: tuple[str, ...]
    shape: Ints
    num_dims: Ints
    geometry: Geometry
    source: ShardTable
    target: ShardTable


def tables(trainer: Sequence[RankLayout], engine: Sequence[RankLayout], specs: Iterable[TensorSpec]) -> Tables:
    """Both sides as columns. `specs` are the tensors that either side has; layouts come sorted by rank."""
    tensors = tuple(specs)
    index = {spec.name: number for number, spec in enumerate(tensors)}
    boxes, strides = Numbered[Box](), Numbered[tuple[int, ...]]()
    dtypes = tuple(sorted({spec.dtype for layout in (*trainer, *engine) for spec in layout.buffers}))
    source = _side(trainer, index, dtypes, boxes, strides)
    target = _side(engine, index, dtypes, boxes, strides)
    found, steps = boxes.items, strides.items
    shapes = Numbered[tuple[int, ...]]()
    shape_of = ints(shapes.numbers([spec.shape for spec in tensors]))
    width = max(1, *(len(box.lo) for box in found), *map(len, steps), *map(len, shapes.items))
    lo, hi = padded([box.lo for box in found], width, 0), padded([box.hi for box in found], width, 1)
    geometry = Geometry(tuple(found), tuple(steps), lo, hi, padded(steps, width, 1), (hi - lo).prod(axis=1))
    shape, num_dims = padded(shapes.items, width, 1)[shape_of], ints(map(len, shapes.items))[shape_of]
    return Tables(tensors, dtypes, shape, num_dims, geometry, source, target)


def padded(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> Ints:
    """Tuples of up to `width` numbers as rows of exactly that many."""
    filled = [row + (fill,) * (width - len(row)) for row in rows]
    return np.array(filled, dtype=np.int64).reshape(len(rows), width)


def runs(keys: Ints) -> tuple[Ints, Ints]:
    """(start, length) of each run of equal keys."""
    if not len(keys):
        return ints(()), ints(())
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))).astype(np.int64)
    return starts, np.diff(np.append(starts, len(keys)))


def _side(
    layouts: Sequence[RankLayout],
    index: dict[str, int],
    dtypes: Sequence[str],
    boxes: Numbered[Box],
    strides: Numbered[tuple[int, ...]],
) -> ShardTable:
    held = [columns_of(layout) for layout in layouts]
    buffers = [spec for layout in layouts for spec in layout.buffers]
    lists = {id(layout.tensors): layout.tensors for layout in layouts}
    numbers = {key: ints([index[spec.name] for spec in specs]) for key, specs in lists.items()}
    described = [numbers[id(layout.tensors)] for layout in layouts]
    num_buffers = ints(len(layout.buffers) for layout in layouts)
    rank = ints(layout.rank for layout in layouts)
    num_shards = ints(map(len, held))

    def column(parts: Iterable[Ints]) -> Ints:
        return np.concatenate([ints(()), *parts])

    return ShardTable(
        layouts=tuple(layouts),
        first=np.append(0, np.cumsum(num_shards)),
        rank=np.repeat(rank, num_shards),
        # Number -1, a name that no layout describes, stays -1.
        tensor=column(np.append(names, -1)[each.tensor] for names, each in zip(described, held, strict=True)),
        box=column(ints(boxes.numbers(each.boxes))[each.box] for each in held),
        buffer=column(
            np.where(each.buffer < 0, -1, each.buffer + start)
            for each, start in zip(held, np.cumsum(num_buffers) - num_buffers, strict=True)
        ),
        offset=column(each.offset for each in held),
        strides=column(ints(strides.numbers(each.steps))[each.strides] for each in held),
        buffers=tuple(buffers),
        buffer_rank=np.repeat(rank, num_buffers),
        buffer_size=ints([spec.num_elements for spec in buffers]),
        buffer_dtype=ints(Numbered(dtypes).numbers([spec.dtype for spec in buffers])),
        described=column(described),
        described_rank=np.repeat(rank, [len(layout.tensors) for layout in layouts]),
    )
