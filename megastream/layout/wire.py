"""Layouts as bytes: what ranks put into the control plane, and what the digest of a plan covers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
import numpy as np

from megastream.layout.box import Box
from megastream.layout.columns import Ints, Numbered, ShardColumns, columns_of
from megastream.layout.shard import BufferSpec, RankLayout, Side, TensorSpec

WIRE_VERSION = 3

PartT = TypeVar("PartT")

_Numbers = tuple[int, ...]
_NUM_COLUMNS = 5


class _Tensors(msgspec.Struct, frozen=True, array_like=True):
    """Tensors of a few kinds (shape, dtype); `kind_of`: a little-endian 32-bit number for each name."""

    names: tuple[str, ...]
    kinds: tuple[tuple[_Numbers, str], ...]
    kind_of: bytes


class _Geometry(msgspec.Struct, frozen=True, array_like=True):
    """Boxes and strides, which shards refer to by number."""

    boxes: tuple[tuple[_Numbers, _Numbers], ...]
    steps: tuple[_Numbers, ...]


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """What ranks have in common is encoded by itself: `tensors` (`_Tensors`), `buffers` and `geometry` (`_Geometry`).
    `shards`: tensor, box, buffer, offset and strides of all shards, as one column of little-endian 64-bit numbers
    behind the other."""

    version: int
    side: Side
    rank: int
    world_size: int
    coords: dict[str, int]
    tensors: bytes
    buffers: bytes
    geometry: bytes
    shards: bytes
    unused: tuple[str, ...]
    notes: dict[str, str]


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What all versions begin with."""

    version: int


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(_Wire)
_head_decoder = msgspec.msgpack.Decoder(_Head)
_tensors_decoder = msgspec.msgpack.Decoder(_Tensors)
_buffers_decoder = msgspec.msgpack.Decoder(tuple[BufferSpec, ...])
_geometry_decoder = msgspec.msgpack.Decoder(_Geometry)


def encode_layout(layout: RankLayout) -> bytes:
    """Canonical bytes: equal layouts give equal bytes. ValueError names a shard of an unknown tensor or buffer."""
    columns = columns_of(layout)
    unknown = np.flatnonzero((columns.tensor < 0) | (columns.buffer < 0))
    if len(unknown):
        shard = layout.shards[unknown[0]]
        raise ValueError(
            f"{layout.side} rank {layout.rank}: shard of {shard.tensor} in buffer {shard.buffer} of rank "
            f"{shard.rank} refers to a tensor, buffer or rank that the layout does not describe"
        )
    numbers = np.stack((columns.tensor, columns.box, columns.buffer, columns.offset, columns.strides))
    return _encoder.encode(
        _Wire(
            version=WIRE_VERSION,
            side=layout.side,
            rank=layout.rank,
            world_size=layout.world_size,
            coords=layout.coords,
            tensors=_encoder.encode(_tensors(layout.tensors)),
            buffers=_encoder.encode(layout.buffers),
            geometry=_encoder.encode(_Geometry(tuple((box.lo, box.hi) for box in columns.boxes), columns.steps)),
            shards=numbers.astype("<i8").tobytes(),
            unused=layout.unused,
            notes=layout.notes,
        )
    )


def decode_layout(raw: bytes | memoryview) -> RankLayout:
    """Inverse of `encode_layout`. ValueError says why bytes cannot be read."""
    return decode_layouts([raw])[0]


def decode_layouts(blobs: Iterable[bytes | memoryview]) -> list[RankLayout]:
    """`decode_layout` of each; what several of them say alike (tensors, buffers, boxes) is decoded once and shared."""
    known = _Known()
    return [_decode(raw, known) for raw in blobs]


class _Known:
    """Parts of layouts that are decoded already, by their bytes."""

    def __init__(self) -> None:
        self.tensors: dict[bytes, tuple[TensorSpec, ...]] = {}
        self.buffers: dict[bytes, tuple[BufferSpec, ...]] = {}
        self.geometry: dict[bytes, tuple[tuple[Box, ...], tuple[_Numbers, ...]]] = {}


def _once(known: dict[bytes, PartT], raw: bytes, decode: Callable[[bytes], PartT]) -> PartT:
    found = known.get(raw)
    if found is None:
        found = known[raw] = decode(raw)
    return found


def _decode(raw: bytes | memoryview, known: _Known) -> RankLayout:
    try:
        if (version := _head_decoder.decode(raw).version) != WIRE_VERSION:
            raise ValueError(f"layout has wire version {version}, this side reads {WIRE_VERSION}; use equal releases")
        wire = _decoder.decode(raw)
        where = f"layout of {wire.side} rank {wire.rank}"
        tensors = _once(known.tensors, wire.tensors, lambda part: _specs(part, where))
        buffers = _once(known.buffers, wire.buffers, _buffers_decoder.decode)
        boxes, steps = _once(known.geometry, wire.geometry, _geometry)
    except msgspec.MsgspecError as error:
        raise ValueError(f"layout of {len(raw)} bytes cannot be read: {error}") from error
    if len(wire.shards) % (_NUM_COLUMNS * 8):
        raise ValueError(f"{where} has {len(wire.shards)} bytes of shards; {_NUM_COLUMNS * 8} each are expected")
    columns = np.frombuffer(wire.shards, "<i8").reshape(_NUM_COLUMNS, -1).astype(np.int64)
    counted = {"tensor": (0, tensors), "box": (1, boxes), "buffer": (2, buffers), "strides": (4, steps)}
    for what, (column, items) in counted.items():
        _check_known(where, what, columns[column], len(items))
    return RankLayout(
        side=wire.side,
        rank=wire.rank,
        world_size=wire.world_size,
        coords=wire.coords,
        tensors=tensors,
        buffers=buffers,
        shards=ShardColumns(wire.rank, tensors, buffers, boxes, steps, *columns),
        unused=wire.unused,
        notes=wire.notes,
    )


def _tensors(specs: tuple[TensorSpec, ...]) -> _Tensors:
    kinds = Numbered[tuple[_Numbers, str]]()
    kind_of = np.array(kinds.numbers([(spec.shape, spec.dtype) for spec in specs]), dtype="<u4")
    return _Tensors(tuple([spec.name for spec in specs]), tuple(kinds.items), kind_of.tobytes())


def _specs(raw: bytes, where: str) -> tuple[TensorSpec, ...]:
    wire = _tensors_decoder.decode(raw)
    if len(wire.kind_of) != 4 * len(wire.names):
        raise ValueError(f"{where} has {len(wire.names)} tensors, and {len(wire.kind_of)} bytes of their kinds")
    numbers = np.frombuffer(wire.kind_of, "<u4").astype(np.int64)
    _check_known(where, "tensor kind", numbers, len(wire.kinds))
    shapes, dtypes = [shape for shape, _ in wire.kinds], [dtype for _, dtype in wire.kinds]
    kinds = numbers.tolist()
    return tuple(map(TensorSpec, wire.names, map(shapes.__getitem__, kinds), map(dtypes.__getitem__, kinds)))


def _geometry(raw: bytes) -> tuple[tuple[Box, ...], tuple[_Numbers, ...]]:
    wire = _geometry_decoder.decode(raw)
    return tuple(Box(lo, hi) for lo, hi in wire.boxes), wire.steps


def _check_known(where: str, what: str, column: Ints, known: int) -> None:
    bad = np.flatnonzero((column < 0) | (column >= known))
    if len(bad):
        raise ValueError(f"{where}: number {bad[0]} has {what} {column[bad[0]]} of {known}")
