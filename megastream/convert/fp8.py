"""Weights in fp8, blockwise, as DeepSeek-V3's Hugging Face files have them.

The weight of a linear is float8_e4m3fn; the tensor `<its name>_scale_inv` has one fp32 scale for each block of
128 x 128, those at the right and lower borders being smaller. A scale is the block's largest magnitude / 448, the
largest that fp8 has, but at least the smallest normal fp32; what is stored is weight / scale in fp32, rounded to
nearest, ties to even. An engine computes with stored * scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megastream.convert.dtypes import to_fp8
from megastream.layout.box import Box

BLOCK = 128
QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
"""What config.json says of such files."""

_LARGEST = np.float32(448)
_LEAST_SCALE = np.finfo(np.float32).tiny
_SLACK = np.float32(1 + 2.0**-16)
"""Quotients and products are rounded to fp32, at most 2**-18 of half a step each."""

Floats = npt.NDArray[np.float32]


def scale_name(tensor: str) -> str:
    return f"{tensor}_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // BLOCK) for size in shape)


def scale_box(box: Box) -> Box:
    """The scales of a box that begins at the border of a block."""
    return Box(tuple(low // BLOCK for low in box.lo), scale_shape(box.hi))


def tiles(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """A matrix as boxes of whole blocks, of at most `most` elements (one block at least), row by row."""
    rows, columns = shape
    blocks, across = max(most // BLOCK**2, 1), -(-columns // BLOCK)
    height, width = max(blocks // across, 1) * BLOCK, min(blocks, across) * BLOCK
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield Box((top, left), (min(top + height, rows), min(left + width, columns)))


def quantize(values: Floats) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Bits of fp8, and scales, of a matrix that begins at the border of a block and is finite. `values` is used up."""
    scales = _scales(values)
    for band, row in _bands(values, scales):
        band /= row
    return to_fp8(values), scales


def dequantize(values: Floats, scales: Floats) -> Floats:
    """What an engine computes with, in place of the values of fp8."""
    for band, row in _bands(values, scales):
        band *= row
    return values


def half_steps(values: Floats) -> Floats:
    """How far the nearest fp8 may lie from each element of a matrix that begins at the border of a block: half the
    distance of the two fp8 values around it, at the scale of its block. 0 in a block that is not finite.
    """
    scales = _scales(values)
    scales[~np.isfinite(scales)] = 0
    steps = np.abs(values)
    for band, row in _bands(steps, scales):
        exponent = np.frexp(np.maximum(band / np.maximum(row, _LEAST_SCALE), np.float32(2.0**-6)))[1]
        band[...] = np.ldexp(row * _SLACK, exponent - 5)
    return steps


def _scales(values: Floats) -> Floats:
    rows, columns = (np.arange(0, size, BLOCK) for size in values.shape)
    largest = np.maximum.reduceat(np.maximum.reduceat(np.abs(values), rows, axis=0), columns, axis=1)
    return np.maximum(largest / _LARGEST, _LEAST_SCALE)


def _bands(values: Floats, scales: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Rows that share their scales, with the scale of each column."""
    for number, row in enumerate(scales):
        yield values[number * BLOCK : (number + 1) * BLOCK], np.repeat(row, BLOCK)[: values.shape[1]]
