"""The engine's side: from live parameters in loader layout to shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from megastream.layout.box import Box
from megastream.layout.mesh import coords_cut
from megastream.layout.naming import Names
from megastream.layout.pack import row_major_strides
from megastream.layout.pattern import Pattern, Patterns
from megastream.layout.rules import Cut
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec

ShapeT = TypeVar("ShapeT")


@dataclass(frozen=True, slots=True)
class EngineParam:
    """One live parameter, contiguous, in the layout that the engine's weight loader writes (not the packed one).

    `experts` gives the global expert of every local slot of a stacked expert parameter; None for all others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    experts: tuple[int, ...] | None = None


def engine_rank_layout(
    family: Names[ShapeT],
    shape: ShapeT,
    *,
    rank: int,
    world_size: int,
    coords: Mapping[str, int],
    params: Sequence[EngineParam],
    unused: Collection[str] = (),
    patterns: Patterns[ShapeT] | None = None,
) -> RankLayout:
    """What one engine rank computes with, one buffer per live parameter. `coords`: tp, tp_size, pp, ep, ...

    Parameters named in `unused` are live copies that no forward reads: they are listed and get no bytes. Expert
    parameters are cut by axis `etp` if `coords` has it; else they are whole on ranks that hold a part of the experts
    (expert parallelism) and cut by `tp` on ranks that hold all. Padded vocabulary rows get no bytes either.
    ValueError names a parameter without a rule, of the wrong shape, or given twice. `patterns`: whoever describes
    several ranks of this model shares them.
    """
    patterns = patterns or Patterns(family, shape)
    tensors: dict[str, TensorSpec] = {}
    buffers: dict[str, BufferSpec] = {}
    shards: list[Shard] = []
    for param in params:
        if param.name in buffers:
            raise ValueError(f"engine rank {rank}: parameter {param.name} is given twice")
        if param.name in unused:
            continue
        pattern, specs = _place(patterns, param, coords, rank)
        buffers[param.name] = BufferSpec(param.name, prod(param.shape), param.dtype)
        for part in pattern.parts:
            tensors[specs[part.index].name] = specs[part.index]
        shards += pattern.shards(specs, rank=rank, buffer=param.name, base=0)
    return RankLayout(
        side="engine",
        rank=rank,
        world_size=world_size,
        coords=dict(coords),
        tensors=tuple(tensors.values()),
        buffers=tuple(buffers.values()),
        shards=tuple(shards),
        unused=tuple(sorted(unused)),
    )


def whole_rank_layout(
    family: Names[ShapeT],
    shape: ShapeT,
    *,
    rank: int,
    world_size: int,
    coords: Mapping[str, int],
    names: Collection[str],
) -> RankLayout:
    """Full tensors, one buffer each, under their Hugging Face names: what the engine's own loader reads on this rank.

    ValueError lists names that the model does not have.
    """
    known = {spec.name: spec for spec in family.tensors(shape)}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"engine rank {rank} asks for tensors that family {family.name} does not have: {unknown[:5]}")
    specs = tuple(known[name] for name in dict.fromkeys(names))
    return RankLayout(
        side="engine",
        rank=rank,
        world_size=world_size,
        coords=dict(coords),
        tensors=specs,
        buffers=tuple(BufferSpec(spec.name, prod(spec.shape), spec.dtype) for spec in specs),
        shards=tuple(
            Shard(spec.name, Box.full(spec.shape), rank, spec.name, 0, row_major_strides(spec.shape)) for spec in specs
        ),
    )


def place_engine_param(
    patterns: Patterns[ShapeT],
    name: str,
    coords: Mapping[str, int],
    experts: tuple[int, ...] | None = None,
    padded_rows: int = 0,
) -> tuple[Pattern, Sequence[TensorSpec]]:
    """How a live parameter lies on the rank at `coords`, and its tensors; `padded_rows` as in `Fused`."""
    if not patterns.stacks_experts(name):
        return patterns.engine(name, coords_cut(coords, "tp"), padded_rows)
    if experts is None:
        raise ValueError(f"{name} stacks experts: the global expert of every slot is needed")
    if "etp" in coords:
        cut = coords_cut(coords, "etp")
    else:
        whole = len(set(experts)) == patterns.family.num_experts(patterns.shape)
        cut = coords_cut(coords, "tp") if whole else Cut("etp", 0, 1)
    return patterns.engine_stack(name, cut, experts)


def _place(
    patterns: Patterns[ShapeT], param: EngineParam, coords: Mapping[str, int], rank: int
) -> tuple[Pattern, Sequence[TensorSpec]]:
    padded = 0
    if not patterns.stacks_experts(param.name) and patterns.engine_entry(param.name).rule == "vocab":
        padded = param.shape[0] * coords_cut(coords, "tp").size
    pattern, tensors = place_engine_param(patterns, param.name, coords, param.experts, padded)
    if pattern.shape != param.shape:
        raise ValueError(
            f"engine rank {rank}: {param.name} has shape {param.shape}, the table gives {pattern.shape}; "
            "a padded or packed parameter cannot be written in place"
        )
    return pattern, tensors
