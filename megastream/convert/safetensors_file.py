"""The safetensors container, read and laid out with numpy alone: eight bytes of length, a JSON header, the data.

Written by hand because weights are copied by position: a header says where every tensor lies before any is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megastream.convert.dtypes import FP8
from megastream.convert.types import ConvertError, NewFile
from megastream.layout.shard import TensorSpec

METADATA = {"format": "pt"}
"""What transformers asks of a file before it reads it."""

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": FP8}
"""In the order of safetensors' writer."""
_CODES = {name: code for code, name in _NAMES.items()}
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2} | {
    "F8_E4M3": 1
}
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file: `dtype` in our words where it travels, else as the file says; `start` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file, by name. ConvertError names the file and what does not fit, or that it is cut off."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise ConvertError(f"{path} is no safetensors file, or cut off: {size} bytes; fetch it again")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ConvertError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConvertError):
            raise
        raise ConvertError(f"{path} has a header that is no JSON ({error}); fetch it again") from error
    if not isinstance(header, dict):
        raise ConvertError(f"{path} has a header that is no JSON object; fetch it again")
    begin = 8 + length
    stored = {name: _stored(path, name, entry, begin) for name, entry in header.items() if name != "__metadata__"}
    _check_gapless(path, stored, begin, size)
    return stored


def layout_file(name: str, specs: Iterable[TensorSpec]) -> tuple[NewFile, dict[str, int]]:
    """A file of these tensors, and the byte at which each begins. Order and header are those of safetensors' writer."""
    order = list(_NAMES.values())
    ordered = sorted(specs, key=lambda spec: (order.index(spec.dtype), spec.name))
    header: dict[str, Any] = {"__metadata__": METADATA}
    at = 0
    for spec in ordered:
        end = at + num_bytes(spec)
        header[spec.name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    begin = 8 + len(text)
    starts = {spec.name: begin + header[spec.name]["data_offsets"][0] for spec in ordered}
    return NewFile(name, begin + at, ((0, len(text).to_bytes(8, "little") + text),)), starts


def grouped(specs: Iterable[TensorSpec], max_file_bytes: int) -> list[list[TensorSpec]]:
    """Files in the order of `specs`, none with more data than `max_file_bytes` unless it is one tensor."""
    groups: list[list[TensorSpec]] = [[]]
    room = max_file_bytes
    for spec in specs:
        size = num_bytes(spec)
        if size > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(spec)
        room -= size
    return groups


def num_bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * _ITEM_BYTES[_CODES[spec.dtype]]


def _stored(path: Path, name: str, entry: Any, begin: int) -> Stored:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        first, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConvertError(f"{path}: the header of {name} cannot be read ({error!r}); fetch it again") from error
    known = _ITEM_BYTES.get(dtype)
    if min(shape, default=0) < 0 or first < 0 or (known is not None and prod(shape) * known != end - first):
        raise ConvertError(
            f"{path}: {name} is {dtype} of shape {shape}, but has bytes {first} to {end}; fetch it again"
        )
    return Stored(_NAMES.get(dtype, dtype), shape, begin + first)


def _check_gapless(path: Path, stored: Mapping[str, Stored], begin: int, size: int) -> None:
    """Tensors lie one behind the other, from the header to the end of the file."""
    at, before = begin, "the header"
    for name, entry in sorted(stored.items(), key=lambda item: (item[1].start, prod(item[1].shape))):
        if entry.start != at:
            what = "overlaps" if entry.start < at else f"lies {entry.start - at} bytes behind"
            raise ConvertError(f"{path}: {name} {what} {before}; fetch it again")
        at, before = at + _length(entry), name
    if at != size:
        raise ConvertError(
            f"{path} has {size} bytes and its header describes {at}; it is cut off or damaged, fetch it again"
        )


def _length(entry: Stored) -> int:
    return prod(entry.shape) * _ITEM_BYTES.get(_CODES.get(entry.dtype, entry.dtype), 1)
