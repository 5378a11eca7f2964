"""Reads pickles without running anything that they name: classes become empty ones that only keep what is put in.

torch's files are pickles, and a checkpoint comes from elsewhere. What we need of one are numbers, names and places.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Opaque:
    """An object of a class that was not imported. Its state becomes attributes, whatever it was called with `args`."""

    def __new__(cls, *args: Any, **named: Any) -> Opaque:
        made = super().__new__(cls)
        made.__dict__["args"] = args
        return made

    def __init__(self, *args: Any, **named: Any) -> None:
        """Called as its class would be; `__new__` has kept the arguments."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})
        else:
            self.__dict__["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of what may have been a dict are no concern of ours, nor are those of a list below."""

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage in the archive: record `data/<key>`."""

    key: str
    dtype: str


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in a storage, in elements."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> TensorRef:
    return TensorRef(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _rebuild_parameter(data: Any, *rest: Any) -> Any:
    return data


def _rebuild_from_type(function: Callable[..., Any], kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    return function(*args)


_STORAGES = {
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{("torch", dtype): dtype for dtype in (*_STORAGES.values(), "float8_e4m3fn", "float8_e5m2")},
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, slice, complex, bytearray)},
}

ERRORS = (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError, MemoryError)
"""What a damaged pickle raises."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        return type(name, (Opaque,), {"__module__": module}) if known is None else known

    def persistent_load(self, pid: Any) -> StorageRef:
        _, dtype, key, *_ = pid
        return StorageRef(str(key), dtype if isinstance(dtype, str) else str(dtype))


def loads(data: bytes) -> Any:
    """The object tree of a pickle. One of ERRORS when it is damaged."""
    return _Unpickler(io.BytesIO(data), encoding="utf-8").load()
