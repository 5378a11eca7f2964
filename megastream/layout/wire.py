"""Layouts as bytes: what ranks put into the control plane, and what the digest of a plan covers."""

from __future__ import annotations

import msgspec

from megastream.layout.box import Box
from megastream.layout.shard import BufferSpec, RankLayout, Shard, Side, TensorSpec

WIRE_VERSION = 1

_Ints = tuple[int, ...]


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    """Names are written once; shards refer to them by index."""

    version: int
    side: Side
    rank: int
    world_size: int
    coords: dict[str, int]
    tensors: tuple[tuple[str, _Ints, str], ...]
    buffers: tuple[tuple[str, int, str], ...]
    shards: tuple[tuple[int, _Ints, _Ints, int, int, _Ints], ...]
    unused: tuple[str, ...]
    notes: dict[str, str]


_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(_Wire)


def encode_layout(layout: RankLayout) -> bytes:
    """Canonical bytes: equal layouts give equal bytes. ValueError names a shard of an unknown tensor or buffer."""
    tensors = {spec.name: index for index, spec in enumerate(layout.tensors)}
    buffers = {spec.name: index for index, spec in enumerate(layout.buffers)}
    shards = []
    for shard in layout.shards:
        if shard.tensor not in tensors or shard.buffer not in buffers or shard.rank != layout.rank:
            raise ValueError(
                f"{layout.side} rank {layout.rank}: shard of {shard.tensor} in buffer {shard.buffer} of rank "
                f"{shard.rank} refers to a tensor, buffer or rank that the layout does not describe"
            )
        box = shard.box
        shards.append((tensors[shard.tensor], box.lo, box.hi, buffers[shard.buffer], shard.offset, shard.strides))
    return _encoder.encode(
        _Wire(
            version=WIRE_VERSION,
            side=layout.side,
            rank=layout.rank,
            world_size=layout.world_size,
            coords=layout.coords,
            tensors=tuple((spec.name, spec.shape, spec.dtype) for spec in layout.tensors),
            buffers=tuple((spec.name, spec.num_elements, spec.dtype) for spec in layout.buffers),
            shards=tuple(shards),
            unused=layout.unused,
            notes=layout.notes,
        )
    )


def decode_layout(raw: bytes | memoryview) -> RankLayout:
    """Inverse of `encode_layout`. ValueError says why bytes cannot be read."""
    try:
        wire = _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise ValueError(f"layout of {len(raw)} bytes cannot be read: {error}") from error
    if wire.version != WIRE_VERSION:
        raise ValueError(f"layout has wire version {wire.version}, this side reads {WIRE_VERSION}; use equal releases")
    tensors = tuple(TensorSpec(*spec) for spec in wire.tensors)
    buffers = tuple(BufferSpec(*spec) for spec in wire.buffers)
    for tensor, _, _, buffer, _, _ in wire.shards:
        if not (0 <= tensor < len(tensors) and 0 <= buffer < len(buffers)):
            raise ValueError(f"layout of {wire.side} rank {wire.rank} has a shard of tensor {tensor}, buffer {buffer}")
    return RankLayout(
        side=wire.side,
        rank=wire.rank,
        world_size=wire.world_size,
        coords=wire.coords,
        tensors=tensors,
        buffers=buffers,
        shards=tuple(
            Shard(tensors[tensor].name, Box(lo, hi), wire.rank, buffers[buffer].name, offset, strides)
            for tensor, lo, hi, buffer, offset, strides in wire.shards
        ),
        unused=wire.unused,
        notes=wire.notes,
    )
