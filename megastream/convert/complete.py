"""Before anything moves: a holding has every element of every weight, and where it has one twice, the two are equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from megastream.convert.dtypes import FP8, Array, as_float
from megastream.convert.fp8 import scale_name
from megastream.convert.model import Model
from megastream.convert.reading import Reader, parts
from megastream.convert.types import ConvertError, Holding
from megastream.layout.box import Box
from megastream.layout.pack import ITEM_BYTES
from megastream.layout.shard import Shard

COMPARE_ELEMENTS = 1 << 20
"""Read at once from each of two places that are compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element of a tensor that differs, with its two values."""

    tensor: str
    index: tuple[int, ...]
    values: tuple[float, float]

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return f"{self.tensor}[{at}] is {self.values[0]:.9g} in one and {self.values[1]:.9g} in the other"


def check_complete(holding: Holding, model: Model, *, fp8: bool = False) -> None:
    """ConvertError names weights that are missing, the region of one that nothing holds, or a type that is not ours.

    `fp8`: weights in fp8 are fine where their scales are there.
    """
    _check_dtypes(holding, fp8)
    shards = by_tensor(holding)
    expected = model.tensors()
    missing = [name for name in expected if name not in shards]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        remedy = f"fetch the rest of it{_if_packed(holding)}"
        raise ConvertError(f"{holding.folder} ({holding.form}) lacks {', '.join(missing[:5])}{more}; {remedy}")
    for name, spec in expected.items():
        rest = [Box.full(spec.shape)]
        for box in {shard.box for shard in shards[name]}:
            rest = [left for part in rest for left in part.subtract(box)]
        if rest:
            num = sum(box.volume for box in rest)
            raise ConvertError(
                f"{holding.folder} ({holding.form}) lacks {num} of {prod(spec.shape)} elements of {name}, from "
                f"{rest[0].lo} to {rest[0].hi}; a file is missing, or the layout is another one"
            )


def _if_packed(holding: Holding) -> str:
    if holding.form != "sharded_state":
        return ""
    return ", or, if an engine saved it whose kernels pack weights, convert what that was started from"


def _check_dtypes(holding: Holding, fp8: bool) -> None:
    for layout in holding.layouts:
        for spec in layout.buffers:
            scaled = spec.dtype == FP8 and (layout.rank, scale_name(spec.name)) in holding.extents
            if spec.dtype not in ITEM_BYTES and not (fp8 and scaled):
                more = "; fp8 can be verified only, convert the weights that it was made of" if scaled else ""
                where = holding.where(layout.rank, spec.name)
                raise ConvertError(
                    f"{where} is {spec.dtype}; types that can be converted are {', '.join(ITEM_BYTES)}{more}"
                )


def check_replicas(holding: Holding, reader: Reader) -> int:
    """Compares whatever is held more than once; returns the number of elements compared.

    ConvertError names the tensor, the element, both files and both values. No copy wins over another.
    """
    compared = 0
    for shards in by_tensor(holding).values():
        for one, other, box in _overlaps(shards):
            found = first_difference(reader, one, reader, other, box)
            if found is not None:
                raise ConvertError(
                    f"{found}: {holding.where(one.rank, one.buffer)}, and {holding.where(other.rank, other.buffer)}; "
                    "copies of one weight must be equal, take the files of one save"
                )
            compared += box.volume
    return compared


def first_difference(left: Reader, one: Shard, right: Reader, other: Shard, box: Box) -> Difference | None:
    """Compares a box by value, NaN being equal to NaN, whatever the two dtypes are."""
    dtypes = left.dtype(one.rank, one.buffer), right.dtype(other.rank, other.buffer)
    for part in parts(box, COMPARE_ELEMENTS):
        values = left.box(one, part), right.box(other, part)
        if dtypes[0] == dtypes[1] and np.array_equal(*values):
            continue
        floats = [as_float(raw, dtype) for raw, dtype in zip(values, dtypes, strict=True)]
        place = _first_unequal(floats[0], floats[1])
        if place is not None:
            index = tuple(low + at for low, at in zip(part.lo, place, strict=True))
            return Difference(one.tensor, index, (float(floats[0][place]), float(floats[1][place])))
    return None


def by_tensor(holding: Holding) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for layout in holding.layouts:
        for shard in layout.shards:
            found.setdefault(shard.tensor, []).append(shard)
    return found


def _first_unequal(left: Array, right: Array) -> tuple[int, ...] | None:
    unequal = (left != right) & ~(np.isnan(left) & np.isnan(right))
    if not unequal.any():
        return None
    return tuple(int(at) for at in np.unravel_index(int(np.argmax(unequal)), unequal.shape))


def _overlaps(shards: Sequence[Shard]) -> Iterator[tuple[Shard, Shard, Box]]:
    """Pairs that are to be equal: the first holder of a box with every other one, and boxes that cross each other."""
    first: dict[Box, Shard] = {}
    for shard in shards:
        if shard.box in first:
            yield first[shard.box], shard, shard.box
            continue
        yield from _crossing(shard, first.values())
        first[shard.box] = shard


def _crossing(shard: Shard, others: Iterable[Shard]) -> Iterator[tuple[Shard, Shard, Box]]:
    for other in others:
        common = shard.box.intersect(other.box)
        if common is not None:
            yield other, shard, common
