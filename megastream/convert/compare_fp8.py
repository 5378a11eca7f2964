"""Compares a weight by value where a side has it in fp8: with the other side's element, within half a step of fp8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megastream.convert.complete import COMPARE_ELEMENTS, Difference
from megastream.convert.dtypes import as_float
from megastream.convert.fp8 import Floats, dequantize, half_steps, scale_box, tiles
from megastream.convert.reading import Reader
from megastream.layout.box import Box
from megastream.layout.shard import Shard


@dataclass(frozen=True, slots=True)
class Held:
    """A weight on one side: shards that cover it, and its scales when it is in fp8."""

    reader: Reader
    shards: Sequence[Shard]
    scales: Shard | None

    def values(self, box: Box) -> Floats:
        """What an engine computes with, in fp32. The box begins at the border of a block."""
        values = np.empty(box.shape, np.float32)
        for shard in self.shards:
            common = shard.box.intersect(box)
            if common is not None:
                place = tuple(slice(a - low, b - low) for a, b, low in zip(common.lo, common.hi, box.lo, strict=True))
                raw = self.reader.box(shard, common)
                values[place] = as_float(raw, self.reader.dtype(shard.rank, shard.buffer))
        if self.scales is None:
            return values
        return dequantize(values, self.reader.box(self.scales, scale_box(box)))


def fp8_difference(tensor: str, shape: tuple[int, ...], one: Held, other: Held) -> Difference | None:
    """The first element that differs. Against a side that is not in fp8 an element may be off by half of the distance
    of the two fp8 values around that side's, at the scale that its block there asks for: whoever rounds to nearest,
    with the block's largest magnitude as 448, is equal. Two sides in fp8 must be equal in value.
    """
    found = []
    for tile in tiles(shape, COMPARE_ELEMENTS):
        with np.errstate(over="ignore", invalid="ignore"):  # files may hold anything
            values = one.values(tile), other.values(tile)
            plain = [each for each, held in zip(values, (one, other), strict=True) if held.scales is None]
            allowed = half_steps(plain[0]) if plain else np.float32(0)
            equal = (np.abs(values[0] - values[1]) <= allowed) | (values[0] == values[1])
        unequal = ~equal & ~(np.isnan(values[0]) & np.isnan(values[1]))
        if unequal.any():
            place = np.unravel_index(int(np.argmax(unequal)), unequal.shape)
            index = tuple(low + int(at) for low, at in zip(tile.lo, place, strict=True))
            found.append(Difference(tensor, index, (float(values[0][place]), float(values[1][place]))))
    return min(found, key=lambda difference: difference.index, default=None)
