"""torch's own files: a zip of stored (never compressed) records, one of them a pickle that says what lies where.

Read without torch, so that a tensor is an address in a file; written with torch's own pickles, so that it reads them.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from megastream.convert import inert_pickle
from megastream.convert.inert_pickle import TensorRef
from megastream.convert.types import ConvertError
from megastream.layout.pack import item_bytes, row_major_strides
from megastream.layout.shard import TensorSpec

_ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF
"""From here on a number of a zip stands in its 64-bit extra field."""
_DATE = 0x21
"""1 January 1980: the day on which zip begins."""


@dataclass(frozen=True)
class TorchFile:
    """What a file (or a part of one) holds: an object tree with `TensorRef` leaves, and where its storages lie."""

    tree: Any
    starts: Mapping[str, int]
    sizes: Mapping[str, int]

    def start(self, ref: TensorRef, what: str) -> int:
        """The byte of the file at which a tensor's elements begin. ConvertError when they are not all there."""
        item = item_bytes(ref.storage.dtype)
        last = ref.offset + sum((n - 1) * step for n, step in zip(ref.shape, ref.strides, strict=True))
        if prod(ref.shape) and (last + 1) * item > self.sizes.get(ref.storage.key, 0):
            raise ConvertError(f"{what}: its data is cut off; save it again")
        return self.starts[ref.storage.key] + ref.offset * item


class _Part(io.RawIOBase):
    """Bytes [start, start + length) of an open file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def read_torch_file(file: BinaryIO, start: int, length: int, what: str) -> TorchFile:
    """What lies in bytes [start, start + length) of an open file. ConvertError calls it `what` when it is damaged."""
    try:
        with zipfile.ZipFile(_Part(file, start, length)) as archive:
            pickles = [info.filename for info in archive.infolist() if info.filename.endswith("data.pkl")]
            (name,) = pickles
            root = name.removesuffix("data.pkl")
            tree = inert_pickle.loads(archive.read(name))
            starts, sizes = {}, {}
            for info in archive.infolist():
                if info.filename.startswith(f"{root}data/"):
                    key = info.filename.removeprefix(f"{root}data/")
                    starts[key] = start + _data_offset(file, start, info)
                    sizes[key] = min(info.file_size, start + length - starts[key])
    except (*inert_pickle.ERRORS, zipfile.BadZipFile, struct.error, OSError, NotImplementedError) as error:
        raise ConvertError(f"{what} is no torch file, or a damaged one ({error}); save it again") from error
    return TorchFile(tree, starts, sizes)


def _data_offset(file: BinaryIO, start: int, info: zipfile.ZipInfo) -> int:
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"record {info.filename} is compressed")
    file.seek(start + info.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return info.header_offset + 30 + int(name) + int(extra)


@dataclass(frozen=True)
class Archive:
    """A torch file that is to be written: its size, the bytes around the data, and where each tensor's data begins."""

    num_bytes: int
    fixed: tuple[tuple[int, bytes], ...]
    starts: tuple[int, ...]


def lay_out_archive(pickled: bytes, specs: Sequence[TensorSpec], start: int = 0) -> Archive:
    """The archive of these tensors, one storage each, from byte `start` of a file on; `start` is a multiple of 64.

    The sum of a record is known only when all of it is written, and torch checks none: those of the data are left 0,
    as torch does under `set_crc32_options(False)`.
    """
    records: list[tuple[str, bytes | int]] = [("data.pkl", pickled), ("byteorder", b"little")]
    records += [(f"data/{number}", prod(s.shape) * item_bytes(s.dtype)) for number, s in enumerate(specs)]
    records.append(("version", b"3\n"))
    fixed, starts, directory, at = [], [], b"", 0
    for name, content in records:
        data = content if isinstance(content, bytes) else b""
        size = content if isinstance(content, int) else len(content)
        local, entry = _headers(f"archive/{name}".encode(), zlib.crc32(data), size, at)
        fixed.append((start + at, local + data))
        if isinstance(content, int):
            starts.append(start + at + len(local))
        directory += entry
        at += len(local) + size
    end = directory + _end(len(records), len(directory), at)
    fixed.append((start + at, end))
    return Archive(at + len(end), tuple(fixed), tuple(starts))


def _headers(name: bytes, crc: int, size: int, at: int) -> tuple[bytes, bytes]:
    """The header before a record, which ends where the data begins, and its entry in the directory."""
    large = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LIMIT else b""
    begin = at + 30 + len(name) + len(large)
    fill = -(begin + 4) % _ALIGNMENT
    extra = large + struct.pack("<HH", 0x4246, fill) + b"Z" * fill
    shown = min(size, _LIMIT)
    common = struct.pack("<HHHHHIII", 45, 0, 0, 0, _DATE, crc, shown, shown)
    local = b"PK\x03\x04" + common + struct.pack("<HH", len(name), len(extra)) + name + extra
    far = struct.pack("<QQ", size, size) if size >= _LIMIT else b""
    far += struct.pack("<Q", at) if at >= _LIMIT else b""
    more = struct.pack("<HH", 1, len(far)) + far if far else b""
    places = struct.pack("<HHHHHII", len(name), len(more), 0, 0, 0, 0, min(at, _LIMIT))
    return local, b"PK\x01\x02" + struct.pack("<H", 45) + common + places + name + more


def _end(num: int, size: int, at: int) -> bytes:
    end = b""
    if at + size >= _LIMIT or num >= 0xFFFF:
        end = b"PK\x06\x06" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, num, num, size, at)
        end += b"PK\x06\x07" + struct.pack("<IQI", 0, at + size, 1)
    few = min(num, 0xFFFF)
    return end + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, few, few, min(size, _LIMIT), min(at, _LIMIT), 0)


class Slot:
    """Stands in a tree for tensor `number` of the archive; torch reads a tensor there."""

    def __init__(self, number: int, spec: TensorSpec) -> None:
        self.number, self.spec = number, spec

    def __reduce__(self) -> tuple[Any, ...]:
        torch = import_torch()
        shape = self.spec.shape
        return torch._utils._rebuild_tensor_v2, (
            _Storage(self),
            0,
            shape,
            row_major_strides(shape),
            False,
            OrderedDict(),
        )


@dataclass(frozen=True)
class _Storage:
    slot: Slot


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        spec = obj.slot.spec
        torch = import_torch()
        kinds = {"float32": torch.FloatStorage, "bfloat16": torch.BFloat16Storage, "float16": torch.HalfStorage}
        return "storage", kinds[spec.dtype], str(obj.slot.number), "cpu", prod(spec.shape)


def pickled(tree: Any) -> bytes:
    """A tree with `Slot` leaves as torch's pickle."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(tree)
    return stream.getvalue()


def import_torch() -> Any:
    """torch. ConvertError in an installation without it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ConvertError("Megatron's forms are written with torch; pip install 'megastream[trainer]'") from error
    return torch


def open_file(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConvertError(f"{path} cannot be read: {error.strerror}") from error
