"""Element types without torch: bf16 and fp8 are kept as their bits, and cast by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megastream.layout.pack import item_bytes

Array = npt.NDArray[Any]

FP8 = "float8_e4m3fn"
"""Stands in files only, with scales in a tensor of its own; see `megastream.convert.fp8`."""

_RAW: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    FP8: np.dtype("u1"),
}


def raw_dtype(name: str) -> np.dtype[Any]:
    """numpy's type that holds the bytes of one element. ValueError names a dtype that no file here has."""
    if name != FP8:
        item_bytes(name)
    return _RAW[name]


def cast(values: Array, source: str, target: str) -> Array:
    """Raw elements of `source` as raw elements of `target`, rounded to nearest, ties to even; NaN stays NaN."""
    if source == target:
        return values
    floats = as_float(values, source)
    return _to_bfloat16(floats) if target == "bfloat16" else floats.astype(_RAW[target])


def as_float(values: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Raw elements as fp32, which holds every value of every dtype here. Those of fp8 are without their scales."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == FP8:
        return _FP8_VALUES[values]
    return values.astype(np.float32)


def to_fp8(floats: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Contiguous fp32 of magnitudes below 464 as bits of fp8, rounded to nearest, ties to even."""
    bits = floats.view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    # Where the last bit counts 2**-9, adding 2**14, whose own last bit in fp32 does, rounds to it.
    small = (magnitude.view(np.float32) + np.float32(1 << 14)).view(np.uint32) - np.uint32(141 << 23)
    # Elsewhere 3 of 23 bits of the mantissa stay, and the exponent counts from 120 less.
    normal = (magnitude - np.uint32((120 << 23) - 0x7FFFF) + ((magnitude >> 20) & 1)) >> 20
    rounded = np.where(magnitude < np.uint32(121 << 23), small, normal)
    return (rounded | ((bits >> 24) & 0x80)).astype(np.uint8)


def _fp8_values() -> npt.NDArray[np.float32]:
    """The value of each of the 256 codes: sign, 4 bits of exponent, 3 of mantissa; NaN is all bits of these."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.ldexp(np.where(exponent > 0, 8 + mantissa, mantissa), np.maximum(exponent, 1) - 10)
    values[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -values, values).astype(np.float32)


_FP8_VALUES = _fp8_values()


def _to_bfloat16(floats: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(floats).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40  # rounding could make an infinity of a NaN
    return np.where(np.isnan(floats), quiet, rounded).astype(np.uint16)
