"""Refuses layouts that cannot be joined, before anything is planned. Every message names the tensor and the rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from megastream.layout.box import Box
from megastream.layout.pack import item_bytes
from megastream.layout.shard import BufferSpec, RankLayout, Shard, Side, TensorSpec
from megastream.plan.types import Transform
from megastream.plan.unit import PlaceOf, stage_of

# Casts at the source that keep a model's meaning: to the engine's narrower type, or to one that holds every value.
CASTS = frozenset({("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float16", "float32")})


def check_layouts(trainer: Sequence[RankLayout], engine: Sequence[RankLayout], place_of: PlaceOf) -> None:
    """ValueError for the first thing wrong: ranks missing, tensors that only one side has, shapes that differ,
    shards given twice or outside their tensor or buffer, tensors that the engine ranks do not cover."""
    sides = _check_side(trainer, "trainer"), _check_side(engine, "engine")
    _check_stages(trainer, place_of)
    _check_names(*sides)
    for layout in trainer:
        _check_duplicates(layout)
    _check_engine_covers(engine, sides[1])
    for layout in engine:
        _check_buffers(layout, place_of)


def transform_between(tensor: str, source: str, target: str) -> Transform:
    """How bytes of dtype `source` become dtype `target`. ValueError names the tensor for a pair that is refused."""
    if source == target:
        item_bytes(source)
        return "none"
    if (source, target) not in CASTS:
        allowed = ", ".join(sorted(f"{a} to {b}" for a, b in CASTS))
        raise ValueError(f"{tensor}: the trainer holds {source}, the engine {target}; allowed casts: {allowed}")
    return "cast"


def _check_side(layouts: Sequence[RankLayout], side: Side) -> dict[str, TensorSpec]:
    ranks = [layout.rank for layout in layouts]
    world = layouts[0].world_size if layouts else 0
    if not layouts or sorted(ranks) != list(range(world)) or any(item.world_size != world for item in layouts):
        raise ValueError(f"{side} layouts are of ranks {sorted(ranks)} of {world}; every rank is needed exactly once")
    specs: dict[str, TensorSpec] = {}
    for layout in layouts:
        if layout.side != side:
            raise ValueError(f"layout of {layout.side} rank {layout.rank} was given as one of the {side}")
        for spec in layout.tensors:
            known = specs.setdefault(spec.name, spec)
            if known.shape != spec.shape:
                raise ValueError(f"{spec.name}: {side} rank {layout.rank} says {spec.shape}, another {known.shape}")
        buffers = _unique_buffers(layout)
        for shard in layout.shards:
            _check_shard(shard, layout, specs, buffers)
    return specs


def _unique_buffers(layout: RankLayout) -> dict[str, BufferSpec]:
    buffers: dict[str, BufferSpec] = {}
    for spec in layout.buffers:
        if spec.name in buffers:
            raise ValueError(f"{layout.side} rank {layout.rank} describes buffer {spec.name} twice")
        buffers[spec.name] = spec
    return buffers


def _check_shard(
    shard: Shard, layout: RankLayout, specs: dict[str, TensorSpec], buffers: dict[str, BufferSpec]
) -> None:
    where = f"{shard.tensor}: shard on {layout.side} rank {layout.rank}"
    if shard.tensor not in specs or shard.buffer not in buffers or shard.rank != layout.rank:
        raise ValueError(f"{where} refers to a tensor, buffer {shard.buffer} or rank that its layout does not describe")
    shape = specs[shard.tensor].shape
    if len(shape) != len(shard.box.hi) or any(hi > size for hi, size in zip(shard.box.hi, shape, strict=True)):
        raise ValueError(f"{where} covers {shard.box.lo} to {shard.box.hi}, the tensor has shape {shape}")
    if len(shard.strides) != len(shape) or min(shard.strides, default=1) < 1:
        raise ValueError(f"{where} has strides {shard.strides}; each of its {len(shape)} dims needs one of at least 1")
    size = buffers[shard.buffer].num_elements
    if shard.offset < 0:
        raise ValueError(f"{where} starts at element {shard.offset} of buffer {shard.buffer}, which begins at 0")
    if _last(shard) >= size:
        raise ValueError(f"{where} reaches element {_last(shard)} of buffer {shard.buffer}, which has {size}")


def _check_names(trainer: dict[str, TensorSpec], engine: dict[str, TensorSpec]) -> None:
    for have, lack, sides in (
        (engine, trainer, "engine, not the trainer"),
        (trainer, engine, "trainer, not the engine"),
    ):
        names = [name for name in have if name not in lack]
        if names:
            raise ValueError(f"{len(names)} tensors are held by the {sides}: {', '.join(names[:5])}")
    for name, spec in engine.items():
        if trainer[name].shape != spec.shape:
            raise ValueError(f"{name}: the trainer says {trainer[name].shape}, the engine {spec.shape}")


def _check_duplicates(layout: RankLayout) -> None:
    seen: set[tuple[str, Box]] = set()
    for shard in layout.shards:
        if (shard.tensor, shard.box) in seen:
            raise ValueError(
                f"{shard.tensor}: trainer rank {layout.rank} holds {shard.box.lo} to {shard.box.hi} twice; "
                "two parameters map to the same tensor"
            )
        seen.add((shard.tensor, shard.box))


def _check_stages(trainer: Sequence[RankLayout], place_of: PlaceOf) -> None:
    """A layer lives on one stage. Two stages claiming it means that names carry local layer indices."""
    stages: dict[str, int] = {}
    for layout in trainer:
        for spec in layout.tensors:
            stage = stages.setdefault(spec.name, stage_of(layout))
            if stage != stage_of(layout) and place_of(spec.name).layer is not None:
                raise ValueError(
                    f"{spec.name}: trainer stages {stage} and {stage_of(layout)} both hold it; "
                    "parameter names must carry global layer indices"
                )


def _check_buffers(layout: RankLayout, place_of: PlaceOf) -> None:
    """Shards fill an engine buffer without overlap, and whole; only vocabulary rows are padded."""
    shards: dict[str, list[Shard]] = {buffer.name: [] for buffer in layout.buffers}
    for shard in layout.shards:
        shards[shard.buffer].append(shard)
    for buffer in layout.buffers:
        where = f"{buffer.name} on engine rank {layout.rank}"
        clash = overlap(shards[buffer.name])
        if clash is not None:
            raise ValueError(f"{where}: the shard of {clash[1].tensor} overlaps that of {clash[0].tensor}")
        filled = sum(shard.box.volume for shard in shards[buffer.name])
        padded = all(place_of(shard.tensor).kind in ("embed", "head") for shard in shards[buffer.name])
        if filled != buffer.num_elements and not padded:
            raise ValueError(f"{where} has {buffer.num_elements} elements, its shards fill {filled}")


def overlap(shards: Sequence[Shard]) -> tuple[Shard, Shard] | None:
    """Two shards of one buffer that share an element, or None. Elements are counted only where spans overlap."""
    ordered = sorted(shards, key=lambda shard: (shard.offset, shard.tensor))
    behind: list[tuple[int, Shard]] = []
    for shard in ordered:
        behind = [(last, other) for last, other in behind if last >= shard.offset]
        for _, other in behind:
            if np.intersect1d(_elements(shard), _elements(other)).size:
                return other, shard
        behind.append((_last(shard), shard))
    return None


def _last(shard: Shard) -> int:
    return shard.offset + sum((n - 1) * stride for n, stride in zip(shard.box.shape, shard.strides, strict=True))


def _elements(shard: Shard) -> npt.NDArray[np.int64]:
    steps = [np.arange(n) * stride for n, stride in zip(shard.box.shape, shard.strides, strict=True)]
    return (shard.offset + sum(np.ix_(*steps), start=np.int64(0))).ravel()


def _check_engine_covers(engine: Sequence[RankLayout], specs: dict[str, TensorSpec]) -> None:
    boxes: dict[str, set[Box]] = {name: set() for name in specs}
    for layout in engine:
        for shard in layout.shards:
            boxes[shard.tensor].add(shard.box)
    for name, spec in specs.items():
        rest: list[Box] = []
        if sum(box.volume for box in boxes[name]) != prod(spec.shape) or len(boxes[name]) > 1:
            rest = [Box.full(spec.shape)]
            for box in boxes[name]:
                rest = [left for part in rest for left in part.subtract(box)]
        if rest:
            missing = sum(box.volume for box in rest)
            raise ValueError(f"{name}: the engine ranks hold all but {missing} of {prod(spec.shape)} elements")
