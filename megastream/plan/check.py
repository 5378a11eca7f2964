"""Refuses layouts that cannot be joined, before anything is planned. Every message names the tensor and the rank.

What holds of numbers is asked of all shards at once; only the shard that breaks it is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from megastream.layout.box import Box
from megastream.layout.columns import Ints, packed
from megastream.layout.pack import item_bytes
from megastream.layout.shard import RankLayout, Shard, Side, TensorSpec
from megastream.plan.names import Names, check_names, join_names
from megastream.plan.table import ShardTable, Tables, alike, runs, tables
from megastream.plan.types import Transform
from megastream.plan.unit import PlaceOf, stage_of

# Casts at the source that keep a model's meaning: to the engine's narrower type, or to one that holds every value.
CASTS = frozenset({("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"), ("float16", "float32")})


def check_layouts(
    trainer: Sequence[RankLayout], engine: Sequence[RankLayout], place_of: PlaceOf, *, overlay: bool = False
) -> Tables:
    """Both sides as columns. ValueError for the first thing wrong: ranks missing, tensors that only one side has,
    shapes that differ, shards given twice or outside their tensor or buffer, tensors that the engine ranks do not
    cover, and, but for an `overlay`, buffers that are not filled."""
    _check_ranks(trainer, "trainer")
    _check_ranks(engine, "engine")
    names = join_names((*trainer, *engine))
    _check_stages(names, trainer, place_of)
    check_names(names, trainer, engine)
    both = tables(trainer, engine, names)
    _check_shards(both, both.source)
    _check_shards(both, both.target)
    _check_duplicates(both)
    _check_engine_covers(both)
    _check_overlaps(both)
    if not overlay:
        _check_filled(both, place_of)
    return both


def transform_between(tensor: str, source: str, target: str) -> Transform:
    """How bytes of dtype `source` become dtype `target`. ValueError names the tensor for a pair that is refused."""
    if source == target:
        item_bytes(source)
        return "none"
    if (source, target) not in CASTS:
        allowed = ", ".join(sorted(f"{a} to {b}" for a, b in CASTS))
        raise ValueError(f"{tensor}: the trainer holds {source}, the engine {target}; allowed casts: {allowed}")
    return "cast"


def _check_ranks(layouts: Sequence[RankLayout], side: Side) -> None:
    """Every rank of the side describes itself once, and its buffers once."""
    ranks = [layout.rank for layout in layouts]
    world = layouts[0].world_size if layouts else 0
    if not layouts or sorted(ranks) != list(range(world)) or any(item.world_size != world for item in layouts):
        raise ValueError(f"{side} layouts are of ranks {sorted(ranks)} of {world}; every rank is needed exactly once")
    for layout in layouts:
        if layout.side != side:
            raise ValueError(f"layout of {layout.side} rank {layout.rank} was given as one of the {side}")
    for layout in {id(layout.buffers): layout for layout in reversed(layouts)}.values():
        names = [spec.name for spec in layout.buffers]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{side} rank {layout.rank} describes buffer {twice} twice")


def _check_stages(names: Names, trainer: Sequence[RankLayout], place_of: PlaceOf) -> None:
    """A layer lives on one stage. Two stages claiming it means that names carry local layer indices."""
    stages: dict[int, list[RankLayout]] = {}
    for layout in trainer:
        stages.setdefault(stage_of(layout), []).append(layout)
    held = {stage: names.held(layouts) for stage, layouts in sorted(stages.items())}
    for number in np.flatnonzero(np.sum(list(held.values()), axis=0) > 1).tolist():
        name = names.tensors[number].name
        if place_of(name).layer is not None:
            one, other = [stage for stage, tensors in held.items() if tensors[number]][:2]
            raise ValueError(
                f"{name}: trainer stages {one} and {other} both hold it; "
                "parameter names must carry global layer indices"
            )


def _check_shards(both: Tables, side: ShardTable) -> None:
    """Every shard lies inside a described tensor and a described buffer."""
    geometry, dims = both.geometry, np.array([len(box.lo) for box in both.geometry.boxes], dtype=np.int64)
    step_dims = np.array([len(strides) for strides in geometry.strides], dtype=np.int64)
    # As floats, because numbers from a wire may leave 64 bits here; below 2**53 they are exact.
    far, steps = (geometry.hi - geometry.lo - 1).astype(float), geometry.steps
    last = side.offset + sum(far[dim][side.box] * steps[dim][side.strides] for dim in range(geometry.width))
    bad: npt.NDArray[np.bool_] = (side.tensor < 0) | (side.buffer < 0) | (steps.min(axis=0)[side.strides] < 1)
    bad |= (dims[side.box] != both.num_dims[side.tensor]) | (step_dims[side.strides] != dims[side.box])
    for hi, size in zip(geometry.hi, both.shape, strict=True):
        bad |= hi[side.box] > size[side.tensor]
    bad |= (side.offset < 0) | (last >= side.buffer_size[side.buffer])
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        layout = next(layout for layout in side.layouts if layout.rank == side.rank[row])
        spec = both.tensors[side.tensor[row]] if side.tensor[row] >= 0 else None
        raise ValueError(_fault(side.shard(row), layout, spec))


def _fault(shard: Shard, layout: RankLayout, spec: TensorSpec | None) -> str:
    """What is wrong with a shard."""
    where = f"{shard.tensor}: shard on {layout.side} rank {layout.rank}"
    buffers = {buffer.name: buffer for buffer in layout.buffers}
    if spec is None or shard.buffer not in buffers or shard.rank != layout.rank:
        return f"{where} refers to a tensor, buffer {shard.buffer} or rank that its layout does not describe"
    shape = spec.shape
    if len(shape) != len(shard.box.hi) or any(hi > size for hi, size in zip(shard.box.hi, shape, strict=True)):
        return f"{where} covers {shard.box.lo} to {shard.box.hi}, the tensor has shape {shape}"
    if len(shard.strides) != len(shape) or min(shard.strides, default=1) < 1:
        return f"{where} has strides {shard.strides}; each of its {len(shape)} dims needs one of at least 1"
    if shard.offset < 0:
        return f"{where} starts at element {shard.offset} of buffer {shard.buffer}, which begins at 0"
    return (
        f"{where} reaches element {_last(shard)} of buffer {shard.buffer}, which has "
        f"{buffers[shard.buffer].num_elements}"
    )


def _check_duplicates(both: Tables) -> None:
    side = both.source
    keys = packed(side.rank, side.tensor, side.box)
    order = np.argsort(keys, kind="stable")
    twice = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    if len(twice):
        shard = side.shard(int(order[1:][twice].min()))
        raise ValueError(
            f"{shard.tensor}: trainer rank {shard.rank} holds {shard.box.lo} to {shard.box.hi} twice; "
            "two parameters map to the same tensor"
        )


def _check_overlaps(both: Tables) -> None:
    """Shards lie in an engine buffer without overlap."""
    side, geometry = both.target, both.geometry
    order = np.lexsort((side.offset, side.buffer))
    last = side.offset + geometry.reach(side.box, side.strides)
    # Where each shard ends before the next one begins nothing can overlap.
    same = side.buffer[order][:-1] == side.buffer[order][1:]
    mixed = np.flatnonzero(same & (last[order][:-1] >= side.offset[order][1:]))
    order = order[np.isin(side.buffer[order], side.buffer[order[mixed]])]
    start, length = runs(side.buffer[order])
    # Buffers in which shards lie alike are looked at once.
    extent = packed(*(geometry.hi - geometry.lo))[side.box]
    _, first = alike(packed(side.offset, extent, side.strides)[order], start, length)
    for at in first.tolist():
        clash = overlap([side.shard(row) for row in order[start[at] : start[at] + length[at]].tolist()])
        if clash is not None:
            where = f"{clash[0].buffer} on engine rank {clash[0].rank}"
            raise ValueError(f"{where}: the shard of {clash[1].tensor} overlaps that of {clash[0].tensor}")


def _check_filled(both: Tables, place_of: PlaceOf) -> None:
    """Shards fill an engine buffer, which they do not share an element of; only vocabulary rows are padded."""
    side, geometry = both.target, both.geometry
    filled = np.bincount(side.buffer, geometry.volume[side.box], len(side.buffers)).astype(np.int64)
    for number in np.flatnonzero(filled != side.buffer_size).tolist():
        tensors = np.unique(side.tensor[side.buffer == number]).tolist()
        if not all(place_of(both.tensors[tensor].name).kind in ("embed", "head") for tensor in tensors):
            raise ValueError(
                f"{side.buffers[number].name} on engine rank {side.buffer_rank[number]} has "
                f"{side.buffer_size[number]} elements, its shards fill {filled[number]}"
            )


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


def _elements(shard: Shard) -> Ints:
    steps = [np.arange(n) * stride for n, stride in zip(shard.box.shape, shard.strides, strict=True)]
    return (shard.offset + sum(np.ix_(*steps), start=np.int64(0))).ravel()


def _check_engine_covers(both: Tables) -> None:
    """The engine ranks together hold every element; tensors that are cut alike are counted once."""
    side, num_boxes = both.target, len(both.geometry.boxes)
    keys = np.unique(side.tensor * num_boxes + side.box)
    tensors, boxes = keys // num_boxes, keys % num_boxes
    held, whole = np.zeros((2, len(both.tensors)), dtype=bool)
    held[tensors] = True
    # A shard lies inside its tensor: one of its size is all of it.
    whole[tensors[both.geometry.volume[boxes] == both.shape.prod(axis=0)[tensors]]] = True
    tensors, boxes = tensors[~whole[tensors]], boxes[~whole[tensors]]
    start, length = runs(tensors)
    cut, _ = alike(boxes, start, length)
    _, first = np.unique(packed(cut, *both.shape[:, tensors[start]]), return_index=True)
    for at in np.sort(first).tolist():
        spec, cuts = both.tensors[tensors[start[at]]], boxes[start[at] : start[at] + length[at]].tolist()
        missing = _uncovered(spec.shape, [both.geometry.boxes[box] for box in cuts])
        if missing:
            _refuse_hole(spec, missing)
    for number in np.flatnonzero(~held)[:1].tolist():
        _refuse_hole(both.tensors[number], prod(both.tensors[number].shape))


def _uncovered(shape: tuple[int, ...], boxes: Sequence[Box]) -> int:
    rest = [Box.full(shape)]
    for box in boxes:
        rest = [left for part in rest for left in part.subtract(box)]
    return sum(box.volume for box in rest)


def _refuse_hole(spec: TensorSpec, missing: int) -> None:
    raise ValueError(f"{spec.name}: the engine ranks hold all but {missing} of {prod(spec.shape)} elements")
