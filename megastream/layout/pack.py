"""Geometry of row-major memory: element sizes, strides, and flat ranges as boxes."""

from __future__ import annotations

from itertools import accumulate
from math import prod

from megastream.layout.box import Box

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of every dtype that travels."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element. ValueError names a dtype that is not supported and those that are."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype {dtype} is not supported; supported are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array of this shape."""
    return tuple(accumulate(reversed(shape[1:]), int.__mul__, initial=1))[::-1] if shape else ()


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The flat range [start, stop) of a row-major array as at most 2 * ndim - 1 disjoint boxes, in memory order.

    This is what makes a distributed optimizer's slice, which knows nothing of parameters, an ordinary set of shards.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range [{start}, {stop}) does not lie in an array of shape {shape}")
    if start == stop:
        return ()
    if len(shape) <= 1:
        return (Box((start,), (stop,)) if shape else Box((), ()),)
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _under(first, flat_boxes(shape[1:], head, tail))
    boxes: tuple[Box, ...] = ()
    if head:
        boxes += _under(first, flat_boxes(shape[1:], head, row))
        first += 1
    if first < last:
        boxes += (Box((first,) + (0,) * (len(shape) - 1), (last, *shape[1:])),)
    return boxes + _under(last, flat_boxes(shape[1:], 0, tail))


def _under(index: int, boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    return tuple(Box((index, *box.lo), (index + 1, *box.hi)) for box in boxes)
