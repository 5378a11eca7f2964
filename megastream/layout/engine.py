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
from megastream.layout.rules import RULES, Cut, Fused, Placed, expert_stack, region_shard
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
) -> RankLayout:
    """What one engine rank computes with, one buffer per live parameter. `coords`: tp, tp_size, pp, ep, ...

    Parameters named in `unused` are live copies that no forward reads: they are listed and get no bytes. Expert
    parameters are cut by axis `etp` if `coords` has it; else they are whole on ranks that hold a part of the experts
    (expert parallelism) and cut by `tp` on ranks that hold all. Padded vocabulary rows get no bytes either.
    ValueError names a parameter without a rule, of the wrong shape, or given twice.
    """
    tensors: dict[str, TensorSpec] = {}
    buffers: dict[str, BufferSpec] = {}
    shards: list[Shard] = []
    for param in params:
        if param.name in buffers:
            raise ValueError(f"engine rank {rank}: parameter {param.name} is given twice")
        if param.name in unused:
            continue
        placed = _place(family, shape, param, coords, rank)
        buffers[param.name] = BufferSpec(param.name, prod(param.shape), param.dtype)
        for region in placed.regions:
            tensors[region.tensor.name] = region.tensor
            shards.append(region_shard(region, placed.grid, rank=rank, buffer=param.name, base=0))
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
    family: Names[ShapeT],
    shape: ShapeT,
    name: str,
    coords: Mapping[str, int],
    experts: Sequence[int] | None = None,
    padded_rows: int = 0,
) -> Placed:
    """The shape and regions of a live parameter on the rank at `coords`; `padded_rows` as in `Fused`."""
    if not family.engine_stacks_experts(name):
        entry = family.engine_entry(name, shape)
        return RULES[entry.rule](Fused(entry.tensors, entry.head_dim, padded_rows), coords_cut(coords, "tp"))
    if experts is None:
        raise ValueError(f"{name} stacks experts: the global expert of every slot is needed")
    entries = [family.engine_entry(name, shape, expert) for expert in experts]
    fused = [Fused(entry.tensors, entry.head_dim, expert=entry.expert) for entry in entries]
    return expert_stack(RULES[entries[0].rule], fused, _expert_cut(coords, len(set(experts)), family, shape))


def _expert_cut(coords: Mapping[str, int], num_local: int, family: Names[ShapeT], shape: ShapeT) -> Cut:
    if "etp" in coords:
        return coords_cut(coords, "etp")
    return coords_cut(coords, "tp") if num_local == family.num_experts(shape) else Cut("etp", 0, 1)


def _place(family: Names[ShapeT], shape: ShapeT, param: EngineParam, coords: Mapping[str, int], rank: int) -> Placed:
    padded = 0
    if not family.engine_stacks_experts(param.name) and family.engine_entry(param.name, shape).rule == "vocab":
        padded = param.shape[0] * coords_cut(coords, "tp").size
    placed = place_engine_param(family, shape, param.name, coords, param.experts, padded)
    if placed.shape != param.shape:
        raise ValueError(
            f"engine rank {rank}: {param.name} has shape {param.shape}, the table gives {placed.shape}; "
            "a padded or packed parameter cannot be written in place"
        )
    return placed
