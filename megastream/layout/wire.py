"""Layouts as bytes: what ranks put into the control plane, and what the digest of a plan covers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from megastream.layout.box import Box
from megastream.layout.columns import Ints, Numbered, ShardColumns, columns_of
from megastream.layout.shard import BufferSpec, RankLayout, Side, TensorSpec

WIRE_VERSION = 2

_Numbers = tuple[int, ...]
_NUM_COLUMNS = 5


class _Tensors(msgspec.Struct, frozen=True, array_like=True):
    """Tensors of a few kinds (shape, dtype); `kind_of`: a little-endian 32-bit number for each name."""

    names: tuple[str, ...]
    kinds: tuple[tuple[_Numbers, str], ...]
    kind_of: bytes


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """Names, boxes and strides are written once. `tensors`: `_Tensors`, encoded by themselves. `shards`: tensor, box,
    buffer, offset and strides of all shards, as one column of little-endian 64-bit numbers behind the other."""

    version: int
    side: Side
    rank: int
    world_size: int
    coords: dict[str, int]
    tensors: bytes
    buffers: tuple[BufferSpec, ...]
    boxes: tuple[tuple[_Numbers, _Numbers], ...]
    steps: tuple[_Numbers, ...]
    shards: bytes
    unused: tuple[str, ...]
    notes: dict[str, str]


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(_Wire)
_tensors_decoder = msgspec.msgpack.Decoder(_Tensors)


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
            buffers=layout.buffers,
            boxes=tuple((box.lo, box.hi) for box in columns.boxes),
            steps=columns.steps,
            shards=numbers.astype("<i8").tobytes(),
            unused=layout.unused,
            notes=layout.notes,
        )
    )


def decode_layout(raw: bytes | memoryview) -> RankLayout:
    """Inverse of `encode_layout`. ValueError says why bytes cannot be read."""
    return decode_layouts([raw])[0]


def decode_layouts(blobs: Iterable[bytes | memoryview]) -> list[RankLayout]:
    """`decode_layout` of each; those that describe the same tensors share one tuple of them."""
    known: dict[bytes, tuple[TensorSpec, ...]] = {}
    return [_decode(raw, known) for raw in blobs]


def _decode(raw: bytes | memoryview, known: dict[bytes, tuple[TensorSpec, ...]]) -> RankLayout:
    try:
        wire = _decoder.decode(raw)
        if wire.version == WIRE_VERSION and wire.tensors not in known:
            known[wire.tensors] = _specs(_tensors_decoder.decode(wire.tensors), f"{wire.side} rank {wire.rank}")
    except msgspec.MsgspecError as error:
        raise ValueError(f"layout of {len(raw)} bytes cannot be read: {error}") from error
    if wire.version != WIRE_VERSION:
        raise ValueError(f"layout has wire version {wire.version}, this side reads {WIRE_VERSION}; use equal releases")
    tensors = known[wire.tensors]
    return RankLayout(
        side=wire.side,
        rank=wire.rank,
        world_size=wire.world_size,
        coords=wire.coords,
        tensors=tensors,
        buffers=wire.buffers,
        shards=_shards(wire, tensors),
        unused=wire.unused,
        notes=wire.notes,
    )


def _tensors(specs: tuple[TensorSpec, ...]) -> _Tensors:
    kinds = Numbered[tuple[_Numbers, str]]()
    kind_of = np.array(kinds.numbers([(spec.shape, spec.dtype) for spec in specs]), dtype="<u4")
    return _Tensors(tuple([spec.name for spec in specs]), tuple(kinds.items), kind_of.tobytes())


def _specs(wire: _Tensors, where: str) -> tuple[TensorSpec, ...]:
    if len(wire.kind_of) != 4 * len(wire.names):
        raise ValueError(
            f"layout of {where} has {len(wire.names)} tensors, and {len(wire.kind_of)} bytes of their kinds"
        )
    numbers = np.frombuffer(wire.kind_of, "<u4").astype(np.int64)
    _check_known(f"layout of {where}", "tensor kind", numbers, len(wire.kinds))
    kinds = zip(wire.names, map(wire.kinds.__getitem__, numbers.tolist()), strict=True)
    return tuple([TensorSpec(name, shape, dtype) for name, (shape, dtype) in kinds])


def _shards(wire: _Wire, tensors: tuple[TensorSpec, ...]) -> ShardColumns:
    where = f"layout of {wire.side} rank {wire.rank}"
    if len(wire.shards) % (_NUM_COLUMNS * 8):
        raise ValueError(f"{where} has {len(wire.shards)} bytes of shards; {_NUM_COLUMNS * 8} each are expected")
    numbers = np.frombuffer(wire.shards, "<i8").reshape(_NUM_COLUMNS, -1).astype(np.int64)
    tensor, box, buffer, offset, strides = numbers
    for what, column, known in (
        ("tensor", tensor, len(tensors)),
        ("box", box, len(wire.boxes)),
        ("buffer", buffer, len(wire.buffers)),
        ("strides", strides, len(wire.steps)),
    ):
        _check_known(where, what, column, known)
    boxes = tuple(Box(lo, hi) for lo, hi in wire.boxes)
    return ShardColumns(wire.rank, tensors, wire.buffers, boxes, wire.steps, tensor, box, buffer, offset, strides)


def _check_known(where: str, what: str, column: Ints, known: int) -> None:
    bad = np.flatnonzero((column < 0) | (column >= known))
    if len(bad):
        raise ValueError(f"{where}: number {bad[0]} has {what} {column[bad[0]]} of {known}")
