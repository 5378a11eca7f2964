"""What rules speak of: how a mesh axis cuts, what a parameter fuses, and where boxes of tensors lie in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod

from megastream.layout.box import Box
from megastream.layout.pack import flat_boxes, row_major_strides
from megastream.layout.shard import Shard, TensorSpec


@dataclass(frozen=True, slots=True)
class Cut:
    """Position `rank` of `size` on a mesh axis that divides a parameter."""

    axis: str
    rank: int
    size: int

    def divide(self, extent: int, what: str) -> int:
        """`extent / size`. ValueError names the axis and both numbers when it does not divide."""
        if extent % self.size:
            raise ValueError(f"{what}: {extent} does not divide by {self.axis}={self.size}")
        return extent // self.size


@dataclass(frozen=True, slots=True)
class Fused:
    """What one parameter is made of: the tensors in the rule's order, and sizes that shapes alone do not tell.

    `expert` is the index in dim 0 of tensors that hold all experts. `parts`, for each tensor: its rows are groups, one
    behind the other, and every group is parts of these many rows. `padded_rows` counts the rows over all ranks of a
    parameter whose rows are padded (vocabulary) or may be replicated (latent); 0: not known.
    """

    tensors: tuple[TensorSpec, ...]
    head_dim: int = 0
    padded_rows: int = 0
    expert: int = 0
    parts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor in a parameter: `box.lo` lies at `origin`, tensor dim d runs along parameter dim `dims[d]`."""

    tensor: TensorSpec
    box: Box
    origin: tuple[int, ...]
    dims: tuple[int, ...]

    def within(self, window: Box) -> Region | None:
        """The part of the region inside a window given in parameter coordinates."""
        extent = [1] * len(self.origin)
        for dim, size in zip(self.dims, self.box.shape, strict=True):
            extent[dim] = size
        end = tuple(a + n for a, n in zip(self.origin, extent, strict=True))
        common = Box(self.origin, end).intersect(window)
        if common is None:
            return None
        shift = tuple(common.lo[dim] - self.origin[dim] for dim in self.dims)
        lo = tuple(a + s for a, s in zip(self.box.lo, shift, strict=True))
        hi = tuple(a + common.shape[dim] for a, dim in zip(lo, self.dims, strict=True))
        return Region(self.tensor, Box(lo, hi), common.lo, self.dims)


@dataclass(frozen=True, slots=True)
class Placed:
    """One rank's parameter: the shape it must have, and the regions that fill it (all of it, but for padded rows).

    `view` is what the regions' origins and dims count in, when it is not `shape`: the same elements in the same order,
    with dims split, so that e.g. rows that alternate between two tensors are a dim of their own.
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    view: tuple[int, ...] = ()

    @property
    def grid(self) -> tuple[int, ...]:
        return self.view or self.shape


Rule = Callable[[Fused, Cut], Placed]


def rows(tensor: TensorSpec, lo: int, hi: int, at: int) -> Region:
    """Rows [lo, hi) of a tensor, all of its other dims, at row `at` of the parameter."""
    num_other = len(tensor.shape) - 1
    box = Box((lo,) + (0,) * num_other, (hi, *tensor.shape[1:]))
    return Region(tensor, box, (at,) + (0,) * num_other, tuple(range(num_other + 1)))


def window_shards(
    placed: Placed, window: Box, strides: Sequence[int], *, rank: int, buffer: str, base: int = 0
) -> Iterator[tuple[TensorSpec, Shard]]:
    """What lies in a window of a parameter, given in its own coordinates, where only the window is stored.

    The window's first element is element `base` of `buffer`; `strides` are the steps there of the parameter's dims.
    """
    splits = _splits(placed)
    steps = [step * inner for step, split in zip(strides, splits, strict=True) for inner in row_major_strides(split)]
    first = base - sum(map(int.__mul__, window.lo, strides))
    for box, region in product(_in_grid(window, splits), placed.regions):
        part = region.within(box)
        if part is not None:
            offset = first + sum(map(int.__mul__, part.origin, steps))
            along = tuple(steps[dim] for dim in part.dims)
            yield part.tensor, Shard(part.tensor.name, part.box, rank, buffer, offset, along)


def _splits(placed: Placed) -> list[tuple[int, ...]]:
    """The dims of the grid that each dim of the parameter is split into."""
    rest, splits = list(placed.grid), []
    for size in placed.shape:
        split = [rest.pop(0)]
        while prod(split) < size:
            split.append(rest.pop(0))
        splits.append(tuple(split))
    return splits


def _in_grid(window: Box, splits: Sequence[tuple[int, ...]]) -> Iterator[Box]:
    """A window of a parameter as boxes of its grid."""
    ranges = zip(splits, window.lo, window.hi, strict=True)
    for boxes in product(*(flat_boxes(split, lo, hi) for split, lo, hi in ranges)):
        yield Box(tuple(chain(*(box.lo for box in boxes))), tuple(chain(*(box.hi for box in boxes))))
