"""A box: a half-open region of a logical tensor, in global coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements x of a tensor with `lo[d] <= x[d] < hi[d]` in every dim d. Never empty."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lo) != len(self.hi) or any(a < 0 or a >= b for a, b in zip(self.lo, self.hi, strict=True)):
            raise ValueError(f"not a box: lo={self.lo} hi={self.hi}; every dim needs 0 <= lo < hi")

    @staticmethod
    def full(shape: tuple[int, ...]) -> Box:
        """The box that covers a whole tensor of this shape."""
        return Box((0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.lo, self.hi, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None when there is none."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(a < b for a, b in zip(lo, hi, strict=True)) else None

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """What is left of this box without `other`, as at most 2 * ndim disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return (self,)
        if common == self:
            return ()
        rest: list[Box] = []
        lo, hi = list(self.lo), list(self.hi)
        for dim in range(len(lo)):
            if lo[dim] < common.lo[dim]:
                rest.append(Box(tuple(lo), (*hi[:dim], common.lo[dim], *hi[dim + 1 :])))
            if common.hi[dim] < hi[dim]:
                rest.append(Box((*lo[:dim], common.hi[dim], *lo[dim + 1 :]), tuple(hi)))
            lo[dim], hi[dim] = common.lo[dim], common.hi[dim]
        return tuple(rest)
