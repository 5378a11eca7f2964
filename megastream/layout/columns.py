"""The shards of a rank as columns of numbers; a `Shard` is made when somebody asks for it.

A large model has hundreds of thousands of shards on all ranks, but a rank has only a few dozen different boxes and
strides: its layers repeat them. Layouts are described, sent and planned in this form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from typing import Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from megastream.layout.box import Box
from megastream.layout.pattern import Pattern
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec

Ints = npt.NDArray[np.int64]
ItemT = TypeVar("ItemT", bound=Hashable)

MAX_KEY = 1 << 62


class Numbered(Generic[ItemT]):
    """Numbers equal things equally, from 0 on, in the order in which they are first seen."""

    def __init__(self, items: Iterable[ItemT] = ()) -> None:
        self._index: dict[ItemT, int] = defaultdict(count().__next__)
        self.numbers(items)

    def numbers(self, items: Iterable[ItemT]) -> list[int]:
        """The number of each item."""
        return list(map(self._index.__getitem__, items))

    def __len__(self) -> int:
        return len(self._index)

    @property
    def items(self) -> list[ItemT]:
        """Item number i at index i."""
        return list(self._index)


def ints(numbers: Iterable[int]) -> Ints:
    return np.fromiter(numbers, np.int64)


def packed(*columns: Ints) -> Ints:
    """Rows of numbers, none negative, as one number each, in the rows' order: equal rows give equal ones.

    Numbers too large for that are replaced by their ranks among what is there."""
    keys, most = np.zeros_like(columns[0]), 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        if most * size > MAX_KEY:
            keys, column = (np.unique(each, return_inverse=True)[1] for each in (keys, column))
            most, size = (int(each.max(initial=0)) + 1 for each in (keys, column))
        keys, most = keys * size + column, most * size
    return keys


def first_use(keys: Ints) -> tuple[Ints, Ints]:
    """Keys numbered from 0 in the order in which they first stand there: the number of each, the first row of each."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], first[order]


def expand(start: Ints, count: Ints) -> tuple[Ints, Ints]:
    """For each row i the numbers start[i], start[i] + 1, ... (count[i] of them): (i, number) of each, in order."""
    rows = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    return rows, start[rows] + within


@dataclass(frozen=True, eq=False)
class ShardColumns(Sequence[Shard]):
    """Row for row a shard of `rank`. `tensor` and `buffer` count in the layout's `tensors` and `buffers`, `box` and
    `strides` in `boxes` and `steps`, which stand in the order of their first use.

    A number of -1 (only in what `columns_of` made of listed shards): the layout describes no such tensor or buffer.
    """

    rank: int
    tensors: tuple[TensorSpec, ...]
    buffers: tuple[BufferSpec, ...]
    boxes: tuple[Box, ...]
    steps: tuple[tuple[int, ...], ...]
    tensor: Ints
    box: Ints
    buffer: Ints
    offset: Ints
    strides: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Shard]:
        columns = (column.tolist() for column in (self.tensor, self.box, self.buffer, self.offset, self.strides))
        for tensor, box, buffer, offset, strides in zip(*columns, strict=True):
            name, held_in = self.tensors[tensor].name, self.buffers[buffer].name
            yield Shard(name, self.boxes[box], self.rank, held_in, offset, self.steps[strides])

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Shard, ...]: ...
    def __getitem__(self, index: int | slice) -> Shard | tuple[Shard, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        row = range(len(self))[index]
        return Shard(
            self.tensors[self.tensor[row]].name,
            self.boxes[self.box[row]],
            self.rank,
            self.buffers[self.buffer[row]].name,
            int(self.offset[row]),
            self.steps[self.strides[row]],
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def columns_of(layout: RankLayout) -> ShardColumns:
    """A layout's shards as columns, in whichever form it has them. A shard of another rank has tensor -1."""
    shards, tensors, buffers = layout.shards, layout.tensors, layout.buffers
    if isinstance(shards, ShardColumns) and (shards.rank, shards.tensors, shards.buffers) == (
        layout.rank,
        tensors,
        buffers,
    ):
        return shards
    known = {spec.name: number for number, spec in enumerate(tensors)}
    lie_in = {spec.name: number for number, spec in enumerate(buffers)}
    boxes, steps = Numbered[Box](), Numbered[tuple[int, ...]]()
    return ShardColumns(
        rank=layout.rank,
        tensors=tensors,
        buffers=buffers,
        tensor=ints([known.get(each.tensor, -1) if each.rank == layout.rank else -1 for each in shards]),
        box=ints(boxes.numbers(each.box for each in shards)),
        buffer=ints([lie_in.get(each.buffer, -1) for each in shards]),
        offset=ints([each.offset for each in shards]),
        strides=ints(steps.numbers(each.strides for each in shards)),
        boxes=tuple(boxes.items),
        steps=tuple(steps.items),
    )


class Parameters:
    """Parameters one after the other, before anything is cut: ranks that hold the same ones share it.

    Parameters of one kind lie alike on any rank: one pattern serves all of them. Of each parameter there are its kind,
    its tensors, the number of its buffer and the element of it that it begins at.
    """

    def __init__(
        self,
        kinds: Sequence[Hashable],
        tensors: Sequence[Sequence[TensorSpec]],
        buffers: Sequence[int],
        bases: Sequence[int],
    ) -> None:
        self._kind = ints(Numbered[Hashable]().numbers(kinds))
        self._buffer, self._base = ints(buffers), ints(bases)
        specs = [spec for each in tensors for spec in each]
        names = [spec.name for spec in specs]
        # The tensors of parameter i are `_number[_first[i] : _first[i] + _num[i]]`, which count in `_specs`.
        self._specs = tuple(dict(zip(names, specs, strict=True)).values())
        self._number = ints(Numbered[str]().numbers(names))
        self._num = ints(map(len, tensors))
        self._first = np.cumsum(self._num) - self._num

    @cached_property
    def examples(self) -> list[int]:
        """The first parameter of each kind."""
        examples: list[int] = np.unique(self._kind, return_index=True)[1].tolist()
        return examples

    def renamed(self, params: Sequence[int], tensors: Iterable[Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
        """All tensors, when these parameters are of these tensors instead, each of as many."""
        specs, rows = list(self._specs), ints(params)
        _, at = expand(self._first[rows], self._num[rows])
        for number, spec in zip(self._number[at].tolist(), chain.from_iterable(tensors), strict=True):
            specs[number] = spec
        return tuple(specs)

    def shards(
        self,
        rank: int,
        buffers: tuple[BufferSpec, ...],
        patterns: Sequence[Pattern],
        *,
        kept: Sequence[Pattern] | None = None,
        specs: tuple[TensorSpec, ...] | None = None,
    ) -> ShardColumns:
        """The shards of a rank on which kind i lies like `patterns[i]`. Of parameter j it holds only `kept[j]`, if
        given; it describes the tensors of whole patterns all the same. `specs`: those of `renamed`."""
        param, tensor, part = self._parts(patterns, self._kind)
        used = np.unique(tensor)
        if kept is not None:
            patterns = kept
            param, tensor, part = self._parts(kept, np.arange(len(kept)))
        parts = [part for pattern in patterns for part in pattern.parts]
        boxes, steps = Numbered[Box](), Numbered[tuple[int, ...]]()
        box, box_rows = first_use(ints(boxes.numbers([each.region.box for each in parts]))[part])
        strides, step_rows = first_use(ints(steps.numbers([each.strides for each in parts]))[part])
        return ShardColumns(
            rank=rank,
            tensors=_picked(self._specs if specs is None else specs, used),
            buffers=buffers,
            boxes=tuple(parts[row].region.box for row in part[box_rows].tolist()),
            steps=tuple(parts[row].strides for row in part[step_rows].tolist()),
            tensor=np.searchsorted(used, tensor),
            box=box,
            buffer=self._buffer[param],
            offset=self._base[param] + ints([each.offset for each in parts])[part],
            strides=strides,
        )

    def _parts(self, patterns: Sequence[Pattern], kind: Ints) -> tuple[Ints, Ints, Ints]:
        """(parameter, tensor, part) of every part of every parameter; parts count through all patterns."""
        num = ints([len(pattern.parts) for pattern in patterns])
        param, part = expand((np.cumsum(num) - num)[kind], num[kind])
        index = ints([part.index for pattern in patterns for part in pattern.parts])
        return param, self._number[self._first[param] + index[part]], part


def _picked(specs: tuple[TensorSpec, ...], used: Ints) -> tuple[TensorSpec, ...]:
    """Ranks that hold parts of all tensors share one tuple."""
    return specs if len(used) == len(specs) else tuple(specs[number] for number in used.tolist())
