"""Shards and layouts: which box of which tensor lives where. Plain data that both sides exchange.

A layout of a large model has a million of the small ones, so these are msgspec's structs: as frozen as a dataclass,
made in a tenth of the time. See `megastream.layout.columns` for the form that layouts have them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from megastream.layout.box import Box

Side = Literal["trainer", "engine"]


class TensorSpec(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A logical tensor under its Hugging Face name. `shape` is global and unpadded; `dtype` is e.g. "bfloat16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class BufferSpec(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A flat run of `num_elements` elements of one dtype on one rank. Offsets and strides of shards count in it.

    On the trainer a buffer is the thing that becomes final at once (a Megatron bucket); on the engine it is one live
    parameter in the layout of vLLM's weight loader.
    """

    name: str
    num_elements: int
    dtype: str


class Shard(msgspec.Struct, frozen=True, gc=False):
    """A box of a tensor and where it lives: `buffer[offset + sum(strides[d] * (x[d] - box.lo[d]))]`, in elements."""

    tensor: str
    box: Box
    rank: int
    buffer: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What one rank of one side holds. `coords` are its mesh coordinates, e.g. {"pp": 1, "ep": 0, "tp": 0}."""

    side: Side
    rank: int
    world_size: int
    coords: dict[str, int]
    tensors: tuple[TensorSpec, ...]
    buffers: tuple[BufferSpec, ...]
    shards: Sequence[Shard]
    # Engine: live copies that it never computes with (e.g. the embedding on vLLM's last stage); they get no bytes.
    # Trainer: parameters that no engine computes with (multi-token prediction); none of their bytes leave.
    unused: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
