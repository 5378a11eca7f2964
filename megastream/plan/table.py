"""The shards of one side as columns of numbers: what the planner computes with.

A model has tens of thousands of tensors and a layout hundreds of thousands of shards, but only a handful of different
boxes and strides: layers that are alike repeat them. So boxes and strides are numbered once for both sides, a shard is
a row of numbers, and whatever depends on geometry alone is worked out once for each kind of row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from megastream.layout.box import Box
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec

Ints = npt.NDArray[np.int64]
ItemT = TypeVar("ItemT", bound=Hashable)


class Numbered(Generic[ItemT]):
    """Numbers equal things equally, from 0 on, in the order in which they are first seen."""

    def __init__(self) -> None:
        self._index: dict[ItemT, int] = defaultdict(count().__next__)

    def numbers(self, items: Iterable[ItemT]) -> list[int]:
        """The number of each item."""
        return list(map(self._index.__getitem__, items))

    def numbers_of_shared(self, items: Sequence[ItemT]) -> Ints:
        """The same for items of which most are one and the same object: each object is compared once."""
        _, first, inverse = np.unique(ints(map(id, items)), return_index=True, return_inverse=True)
        order = np.argsort(first)
        numbers = np.empty_like(order)
        numbers[order] = self.numbers(items[row] for row in first[order])
        return numbers[inverse]

    def __len__(self) -> int:
        return len(self._index)

    @property
    def items(self) -> list[ItemT]:
        """Item number i at index i."""
        return list(self._index)


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
    the geometry; -1 stands for a name that no layout describes. `described` and `described_rank` list which rank's
    layout names which tensor.
    """

    layouts: tuple[RankLayout, ...]
    shards: tuple[Shard, ...]
    rank: Ints
    tensor: Ints
    box: Ints
    buffer: Ints
    offset: Ints
    strides: Ints
    buffers: tuple[BufferSpec, ...]
    buffer_rank: Ints
    buffer_size: Ints
    described: Ints
    described_rank: Ints

    def buffer_numbers(self) -> dict[tuple[int, str], int]:
        """(rank, name) of every buffer, with its number."""
        ranks = self.buffer_rank.tolist()
        return {(rank, spec.name): number for number, (rank, spec) in enumerate(zip(ranks, self.buffers, strict=True))}


@dataclass(frozen=True)
class Tables:
    """Both sides of a plan. `tensors` are numbered as they stand here; `shape` has the geometry's width."""

    tensors: tuple[TensorSpec, ...]
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
    source = _side(trainer, index, boxes, strides)
    target = _side(engine, index, boxes, strides)
    found, steps = boxes.items, strides.items
    width = max(1, *(len(box.lo) for box in found), *map(len, steps), *(len(spec.shape) for spec in tensors))
    lo, hi = padded([box.lo for box in found], width, 0), padded([box.hi for box in found], width, 1)
    geometry = Geometry(tuple(found), tuple(steps), lo, hi, padded(steps, width, 1), (hi - lo).prod(axis=1))
    shape = padded([spec.shape for spec in tensors], width, 1)
    num_dims = ints(len(spec.shape) for spec in tensors)
    return Tables(tensors, shape, num_dims, geometry, source, target)


def ints(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, np.int64)


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


def expand(start: Ints, count: Ints) -> tuple[Ints, Ints]:
    """For each row i the numbers start[i], start[i] + 1, ... (count[i] of them): (i, number) of each, in order."""
    rows = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    return rows, start[rows] + within


def _side(
    layouts: Sequence[RankLayout], index: dict[str, int], boxes: Numbered[Box], strides: Numbered[tuple[int, ...]]
) -> ShardTable:
    shards: list[Shard] = []
    buffers: list[BufferSpec] = []
    tensor: list[int] = []
    buffer: list[int] = []
    described: list[int] = []
    for layout in layouts:
        first = len(buffers)
        numbers = {spec.name: first + number for number, spec in enumerate(layout.buffers)}
        buffers.extend(layout.buffers)
        shards.extend(layout.shards)
        described += [index[spec.name] for spec in layout.tensors]
        tensor += [index.get(shard.tensor, -1) for shard in layout.shards]
        buffer += [numbers.get(shard.buffer, -1) for shard in layout.shards]
    ranks = ints(layout.rank for layout in layouts)
    return ShardTable(
        layouts=tuple(layouts),
        shards=tuple(shards),
        rank=np.repeat(ranks, [len(layout.shards) for layout in layouts]),
        tensor=ints(tensor),
        box=boxes.numbers_of_shared([shard.box for shard in shards]),
        buffer=ints(buffer),
        offset=ints([shard.offset for shard in shards]),
        strides=strides.numbers_of_shared([shard.strides for shard in shards]),
        buffers=tuple(buffers),
        buffer_rank=np.repeat(ranks, [len(layout.buffers) for layout in layouts]),
        buffer_size=ints([spec.num_elements for spec in buffers]),
        described=ints(described),
        described_rank=np.repeat(ranks, [len(layout.tensors) for layout in layouts]),
    )
