"""Carries a plan out: buffer by buffer of the target, window by window of a buffer, each window written once.

A window is a short run of the target file. Everything that belongs into it is read from wherever it lies, and one
positional write puts it in its place; so memory depends on the window, never on the model. A weight that is written in
fp8 goes by tiles of whole blocks instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from megastream.convert.dtypes import Array, as_float, cast, raw_dtype
from megastream.convert.fp8 import quantize, scale_box, scale_name, scale_shape, tiles
from megastream.convert.reading import Reader
from megastream.convert.types import ConvertError, Extent, Holding
from megastream.layout.box import Box
from megastream.layout.pack import item_bytes
from megastream.plan.types import Copy, Plan

MIN_MEMORY_BYTES = 64 << 20
_WORKERS = 4
_MAX_WINDOW_BYTES = 8 << 20
_SHARE = 64
"""A window is at most this part of the budget. Each worker holds one, a run beside it, and the mapped pages of a source
that it picks from: of a column cut these are as many windows as the cut has ranks."""
_TILE_SHARE = 4
"""A tile has at most this part of a window's bytes as elements: some 35 bytes of each are held while it is rounded."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix that is written in fp8, and where its scales go."""

    shape: tuple[int, ...]
    scales: Extent

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) + 4 * prod(scale_shape(self.shape))


@dataclass(frozen=True, slots=True)
class Job:
    """One buffer of the target, and all that is copied into it, as (source rank, source buffer, copy).

    `blocks`: what is copied, of type `dtype`, is written in fp8.
    """

    extent: Extent
    dtype: str
    num_elements: int
    copies: tuple[tuple[int, str, Copy], ...]
    blocks: Blocks | None = None

    @property
    def num_bytes(self) -> int:
        return self.num_elements * item_bytes(self.dtype) if self.blocks is None else self.blocks.num_bytes

    @property
    def files(self) -> set[str]:
        return {self.extent.file} if self.blocks is None else {self.extent.file, self.blocks.scales.file}


def jobs_of(plan: Plan, target: Holding, order: Mapping[str, int]) -> tuple[Job, ...]:
    """One job for each buffer, tensor by tensor in `order`: what several ranks need is read while it is warm."""
    copies: dict[tuple[int, str], list[tuple[int, str, Copy]]] = {}
    for piece in plan.pieces:
        for copy in piece.copies:
            copies.setdefault((piece.target, copy.target_buffer), []).append((piece.source, piece.source_buffer, copy))
    jobs: list[tuple[int, int, int, Job]] = []
    for layout in target.layouts:
        shapes = {spec.name: spec.shape for spec in layout.tensors}
        for spec in layout.buffers:
            if held := copies.get((layout.rank, spec.name)):
                scales = target.extents.get((layout.rank, scale_name(spec.name)))
                blocks = None if scales is None else Blocks(shapes[spec.name], scales)
                job = Job(target.extents[layout.rank, spec.name], spec.dtype, spec.num_elements, tuple(held), blocks)
                jobs.append((min(order[copy.tensor] for _, _, copy in held), layout.rank, len(jobs), job))
    return tuple(job for _, _, _, job in sorted(jobs, key=lambda item: item[:3]))


class Writer:
    """Writes jobs into files that exist already, with a few threads. What one of them raises ends the batch."""

    def __init__(self, folder: Path, reader: Reader, memory_bytes: int) -> None:
        self._folder, self._reader = folder, reader
        self._window_bytes = min(_MAX_WINDOW_BYTES, memory_bytes // _SHARE)
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1), thread_name_prefix="megastream-convert")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def write(self, jobs: Sequence[Job], on_bytes: Callable[[int], None]) -> None:
        """Writes a batch, and returns when it is on the disk. `on_bytes` is told of every window, one at a time."""
        for _ in self._pool.map(lambda job: self._do(job, on_bytes), jobs):
            pass
        for file in sorted({file for job in jobs for file in job.files}):
            os.fsync(self._open(file))

    def _do(self, job: Job, on_bytes: Callable[[int], None]) -> None:
        if job.blocks is None:
            self._fill(job, on_bytes)
        else:
            self._fill_blocks(job, job.blocks, on_bytes)

    def _fill(self, job: Job, on_bytes: Callable[[int], None]) -> None:
        dtype = raw_dtype(job.dtype)
        size = min(max(self._window_bytes // dtype.itemsize, 1), job.num_elements)
        space: Array = np.empty(size, dtype)
        padded = sum(prod(copy.shape) for _, _, copy in job.copies) < job.num_elements
        descriptor = self._open(job.extent.file)
        for start in range(0, job.num_elements, size):
            window = space[: job.num_elements - start]
            if padded:
                window.fill(0)
            for rank, buffer, copy in job.copies:
                for part in clip(copy, start, start + len(window)):
                    self._gather(window, start, part, rank, buffer, job.dtype)
            at = job.extent.start + start * dtype.itemsize
            _write_all(descriptor, window.data.cast("B"), at)
            # Nobody reads it again: the disk begins with it now, not when the batch is synced.
            os.posix_fadvise(descriptor, at, window.nbytes, os.POSIX_FADV_DONTNEED)
            with self._lock:
                on_bytes(window.nbytes)

    def _fill_blocks(self, job: Job, blocks: Blocks, on_bytes: Callable[[int], None]) -> None:
        weights, scales = self._open(job.extent.file), self._open(blocks.scales.file)
        across = scale_shape(blocks.shape)
        for tile in tiles(blocks.shape, self._window_bytes // _TILE_SHARE):
            codes, factors = quantize(self._tile(job, tile, blocks.shape[1]))
            for first, _, rows in _runs(tile, blocks.shape[1]):
                _write_all(weights, codes[rows].data.cast("B"), job.extent.start + first)
            place = scale_box(tile)
            for first, _, rows in _runs(place, across[1]):
                _write_all(scales, factors[rows].data.cast("B"), blocks.scales.start + first * factors.itemsize)
            with self._lock:
                on_bytes(codes.nbytes + factors.nbytes)

    def _tile(self, job: Job, tile: Box, columns: int) -> Any:
        """A tile of a matrix in fp32. ConvertError names an element that is not finite."""
        raw: Array = np.empty(tile.shape, raw_dtype(job.dtype))
        for start, end, rows in _runs(tile, columns):
            for rank, buffer, copy in job.copies:
                for part in clip(copy, start, end):
                    self._gather(raw[rows].reshape(-1), start, part, rank, buffer, job.dtype)
        values = as_float(raw, job.dtype)
        finite = np.isfinite(values)
        if not finite.all():
            at = np.unravel_index(int(np.argmin(finite)), values.shape)
            index = ", ".join(str(low + int(step)) for low, step in zip(tile.lo, at, strict=True))
            raise ConvertError(
                f"{job.copies[0][2].tensor}[{index}] is {values[at]}, which no scale brings to fp8; leave --dtype out"
            )
        return values

    def _gather(self, window: Array, start: int, part: Copy, rank: int, buffer: str, dtype: str) -> None:
        item = window.dtype.itemsize
        view: Any = np.lib.stride_tricks.as_strided(
            window[part.target_offset - start :], part.shape, tuple(step * item for step in part.target_strides)
        )
        source = self._reader.dtype(rank, buffer)
        if source == dtype:
            self._reader.into(view, rank, buffer, part.source_offset, part.source_strides)
            return
        values = np.empty(part.shape, raw_dtype(source))
        self._reader.into(values, rank, buffer, part.source_offset, part.source_strides)
        view[...] = cast(values, source, dtype)

    def _open(self, name: str) -> int:
        with self._lock:
            if name not in self._files:
                self._files[name] = os.open(self._folder / name, os.O_WRONLY)
            return self._files[name]


def _runs(box: Box, columns: int) -> Iterator[tuple[int, int, slice]]:
    """A part of a row-major matrix as flat ranges [start, end) of it, each with the rows of the part that lie there."""
    (top, left), (bottom, right) = box.lo, box.hi
    if right - left == columns:
        yield top * columns, bottom * columns, slice(None)
        return
    for row in range(top, bottom):
        yield row * columns + left, row * columns + right, slice(row - top, row - top + 1)


def clip(copy: Copy, start: int, end: int) -> Iterator[Copy]:
    """The parts of a copy that go to the elements [start, end) of its target buffer, each a copy of its own."""
    spans = [(extent - 1) * step for extent, step in zip(copy.shape, copy.target_strides, strict=True)]
    first, last = copy.target_offset, copy.target_offset + sum(spans)
    if last < start or first >= end:
        return
    if start <= first and last < end:
        yield copy
        return
    dim = max(range(len(spans)), key=spans.__getitem__)
    step, inner = copy.target_strides[dim], sum(spans) - spans[dim]
    low = max(-(-(start - first - inner) // step), 0)  # rows that touch the window
    high = min((end - 1 - first) // step + 1, copy.shape[dim])
    whole_low = max(-(-(start - first) // step), low)  # rows that lie in it
    whole_high = min((end - 1 - inner - first) // step + 1, high)
    if whole_low >= whole_high:
        whole_low = whole_high = high
    for row in (*range(low, whole_low), *range(whole_high, high)):
        yield from clip(_rows(copy, dim, row, row + 1), start, end)
    if whole_low < whole_high:
        yield _rows(copy, dim, whole_low, whole_high)


def _rows(copy: Copy, dim: int, low: int, high: int) -> Copy:
    return replace(
        copy,
        shape=(*copy.shape[:dim], high - low, *copy.shape[dim + 1 :]),
        source_offset=copy.source_offset + low * copy.source_strides[dim],
        target_offset=copy.target_offset + low * copy.target_strides[dim],
    )


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)
