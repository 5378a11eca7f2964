"""Element types without torch: bf16 is kept as its 16 bits, and cast by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megastream.layout.pack import item_bytes

Array = npt.NDArray[Any]

_RAW: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}


def raw_dtype(name: str) -> np.dtype[Any]:
    """numpy's type that holds the bytes of one element. ValueError names a dtype that does not travel."""
    item_bytes(name)
    return _RAW[name]


def cast(values: Array, source: str, target: str) -> Array:
    """Raw elements of `source` as raw elements of `target`, rounded to nearest, ties to even; NaN stays NaN."""
    if source == target:
        return values
    floats = as_float(values, source)
    return _to_bfloat16(floats) if target == "bfloat16" else floats.astype(_RAW[target])


def as_float(values: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Raw elements as fp32, which holds every value of every dtype that travels."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _to_bfloat16(floats: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(floats).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40  # rounding could make an infinity of a NaN
    return np.where(np.isnan(floats), quiet, rounded).astype(np.uint16)
