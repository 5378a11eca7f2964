"""Reads regions of buffers from files, by position. A run is read at once, all else is picked from a map.

Mapped pages are given back after each read, so that what is resident stays what is being worked on.
"""

from __future__ import annotations

import mmap
import os
import threading
from math import prod
from typing import Any

import numpy as np

from megastream.convert.dtypes import Array, raw_dtype
from megastream.convert.types import ConvertError, Holding
from megastream.layout.box import Box
from megastream.layout.shard import Shard

Dims = list[tuple[int, int]]
"""(extent, stride in elements) of every dim."""


class Reader:
    """Open files of one holding; may be used from several threads."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._dtypes = {(layout.rank, spec.name): spec.dtype for layout in holding.layouts for spec in layout.buffers}
        self._files: dict[str, tuple[int, mmap.mmap]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor, mapped in self._files.values():
            mapped.close()
            os.close(descriptor)
        self._files = {}

    def dtype(self, rank: int, buffer: str) -> str:
        return self._dtypes[rank, buffer]

    def into(self, target: Array, rank: int, buffer: str, offset: int, strides: tuple[int, ...]) -> None:
        """Fills `target` with raw elements at `offset` + strides of a buffer. ConvertError when the file ends early."""
        extent = self._holding.extents[rank, buffer]
        descriptor, mapped = self._open(extent.file)
        item = target.dtype.itemsize
        start = extent.start + offset * item
        dims: Dims = [(n, step) for n, step in zip(target.shape, strides, strict=True) if n > 1]
        last = start + (sum((n - 1) * step for n, step in dims) + 1) * item
        if last > len(mapped):
            raise ConvertError(
                f"{self._holding.folder / extent.file} has {len(mapped)} bytes, {buffer} reaches byte {last}; "
                "the file is cut off"
            )
        if not _is_run(dims):
            _pick(mapped, start, last, strides, target)
        elif target.flags.c_contiguous:
            self._read(descriptor, target.reshape(-1).data.cast("B"), start, extent.file)
        else:
            run = np.empty(target.shape, target.dtype)
            self._read(descriptor, run.reshape(-1).data.cast("B"), start, extent.file)
            target[...] = run

    def box(self, shard: Shard, box: Box) -> Array:
        """The raw elements of a box that lies in a shard, in the tensor's own order."""
        values = np.empty(box.shape, raw_dtype(self.dtype(shard.rank, shard.buffer)))
        steps = zip(box.lo, shard.box.lo, shard.strides, strict=True)
        offset = shard.offset + sum((at - low) * step for at, low, step in steps)
        self.into(values, shard.rank, shard.buffer, offset, shard.strides)
        return values

    def _open(self, name: str) -> tuple[int, mmap.mmap]:
        with self._lock:
            if name not in self._files:
                path = self._holding.folder / name
                try:
                    descriptor = os.open(path, os.O_RDONLY)
                    self._files[name] = descriptor, mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                except (OSError, ValueError) as error:
                    raise ConvertError(f"{path} cannot be read: {error}") from error
            return self._files[name]

    def _read(self, descriptor: int, target: memoryview, start: int, name: str) -> None:
        done = 0
        while done < len(target):
            num = os.preadv(descriptor, [target[done:]], start + done)
            if num == 0:
                raise ConvertError(f"{self._holding.folder / name} ends at byte {start + done}; the file is cut off")
            done += num


def _is_run(dims: Dims) -> bool:
    """True when the elements lie one behind the other, in row-major order."""
    expected = 1
    for extent, stride in reversed(dims):
        if stride != expected:
            return False
        expected *= extent
    return True


def _pick(mapped: mmap.mmap, start: int, last: int, strides: tuple[int, ...], target: Array) -> None:
    item = target.dtype.itemsize
    flat: Any = np.frombuffer(mapped, target.dtype, (last - start) // item, start)
    target[...] = np.lib.stride_tricks.as_strided(flat, target.shape, tuple(step * item for step in strides))
    page = start // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, page, last - page)


def parts(box: Box, most: int) -> list[Box]:
    """The box in row-major order, as boxes of at most `most` elements (one element at least)."""
    if box.volume <= most:
        return [box]
    row = prod(box.shape[1:])
    step = max(most // row, 1)
    found = [
        Box((lo, *box.lo[1:]), (min(lo + step, box.hi[0]), *box.hi[1:])) for lo in range(box.lo[0], box.hi[0], step)
    ]
    if row <= most:
        return found
    inner = parts(Box(box.lo[1:], box.hi[1:]), most)
    return [Box((one.lo[0], *part.lo), (one.hi[0], *part.hi)) for one in found for part in inner]
