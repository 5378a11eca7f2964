"""The engine's side: from live parameters in loader layout to shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Generic, TypeVar

from megastream.layout.box import Box
from megastream.layout.columns import Parameters
from megastream.layout.mesh import coords_cut
from megastream.layout.naming import Names
from megastream.layout.pack import row_major_strides
from megastream.layout.pattern import Pattern, Patterns, no_slots
from megastream.layout.placing import Cut
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
    held = EngineParams(patterns or Patterns(family, shape), params, unused, f"engine rank {rank}")
    return held.layout(rank=rank, world_size=world_size, coords=coords)


class EngineParams(Generic[ShapeT]):
    """The parameters of `engine_rank_layout`. Ranks share it that hold the same ones, each its cut or its experts.

    ValueError names `where`, and whatever is wrong with the parameters alone.
    """

    def __init__(
        self, patterns: Patterns[ShapeT], params: Sequence[EngineParam], unused: Collection[str], where: str
    ) -> None:
        self._patterns, self._unused = patterns, tuple(sorted(unused))
        self._params = [param for param in params if param.name not in unused]
        seen = set[str]()
        for param in self._params:
            if param.name in seen:
                raise ValueError(f"{where}: parameter {param.name} is given twice")
            seen.add(param.name)
        found = [patterns.of_engine(param.name, param.experts) for param in self._params]
        self._held = Parameters(
            [(kind, param.shape) for param, (kind, _) in zip(self._params, found, strict=True)],
            [tensors for _, tensors in found],
            range(len(found)),
            [0] * len(found),
        )
        self._buffers = tuple([BufferSpec(param.name, prod(param.shape), param.dtype) for param in self._params])
        self._stacks = [number for number, param in enumerate(self._params) if param.experts is not None]

    def layout(
        self, *, rank: int, world_size: int, coords: Mapping[str, int], experts: tuple[int, ...] | None = None
    ) -> RankLayout:
        """Of the rank at `coords`; errors as of `engine_rank_layout`. `experts`: its own, as many as were given."""
        cuts, specs = engine_cuts(coords), None
        examples = [self._params[number] for number in self._held.examples]
        if experts is not None:
            examples = [_with(param, experts) for param in examples]
            stacks = [self._patterns.of_engine(self._params[number].name, experts)[1] for number in self._stacks]
            specs = self._held.renamed(self._stacks, stacks)
        ways = [_place(self._patterns, param, cuts, rank) for param in examples]
        shards = self._held.shards(rank, self._buffers, ways, specs=specs)
        return RankLayout(
            side="engine",
            rank=rank,
            world_size=world_size,
            coords=dict(coords),
            tensors=shards.tensors,
            buffers=self._buffers,
            shards=shards,
            unused=self._unused,
        )


def _with(param: EngineParam, experts: tuple[int, ...]) -> EngineParam:
    return param if param.experts is None else replace(param, experts=experts)


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


def engine_cuts(coords: Mapping[str, int]) -> tuple[Cut, Cut | None]:
    """How the rank at `coords` cuts what is not of an expert, and experts (None: it depends on how many it has)."""
    return coords_cut(coords, "tp"), coords_cut(coords, "etp") if "etp" in coords else None


def place_engine_param(
    patterns: Patterns[ShapeT],
    name: str,
    cuts: tuple[Cut, Cut | None],
    experts: tuple[int, ...] | None = None,
    padded_rows: int = 0,
) -> tuple[Pattern, Sequence[TensorSpec]]:
    """How a live parameter lies on a rank with these `engine_cuts`, and its tensors; `padded_rows` as in `Fused`."""
    if not patterns.stacks_experts(name):
        return patterns.engine(name, cuts[0], padded_rows)
    if experts is None:
        raise ValueError(no_slots(name))
    cut = cuts[1]
    if cut is None:
        whole = len(set(experts)) == patterns.family.num_experts(patterns.shape)
        cut = cuts[0] if whole else Cut("etp", 0, 1)
    return patterns.engine_stack(name, cut, experts)


def _place(patterns: Patterns[ShapeT], param: EngineParam, cuts: tuple[Cut, Cut | None], rank: int) -> Pattern:
    padded = param.shape[0] * cuts[0].size if param.shape else 0
    pattern, _ = place_engine_param(patterns, param.name, cuts, param.experts, padded)
    if pattern.shape != param.shape:
        raise ValueError(
            f"engine rank {rank}: {param.name} has shape {param.shape}, the table gives {pattern.shape}; "
            "a padded or packed parameter cannot be written in place"
        )
    return pattern
