"""Layouts from layout strings alone: the parameter lists that Megatron and vLLM would have, without either.

`megastream plan` and the tests use it. The real adapters never do: they describe what they find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Protocol, TypeVar

from megastream.layout.engine import EngineParam, EngineParams, engine_cuts, place_engine_param
from megastream.layout.expert_slots import ExpertMap, local_experts
from megastream.layout.mesh import (
    Mesh,
    coords_cut,
    engine_coords,
    engine_stage_layers,
    trainer_coords,
    trainer_stage_layers,
)
from megastream.layout.naming import Names
from megastream.layout.pattern import Patterns
from megastream.layout.shard import BufferSpec, RankLayout
from megastream.layout.trainer import Ownership, TrainerParam, TrainerParams

VLLM_VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this (and of tp)."""

MEGATRON_VOCAB_MULTIPLE = 128
"""Megatron's training scripts pad it to a multiple of this times tp."""

BUCKET_ELEMENTS = 40_000_000
"""Megatron's default bucket size: a bucket closes once it holds this many elements."""

_PARAM_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


class SizedShape(Protocol):
    """The numbers of a model that say which ranks hold what."""

    @property
    def num_layers(self) -> int: ...

    @property
    def mtp_layers(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def vocab(self) -> int: ...

    @property
    def tied(self) -> bool: ...

    @property
    def dtype(self) -> str: ...


ShapeT = TypeVar("ShapeT", bound=SizedShape)


def trainer_layouts(
    family: Names[ShapeT],
    shape: ShapeT,
    mesh: Mesh,
    *,
    ownership: Ownership = "replica",
    bucket_elements: int = BUCKET_ELEMENTS,
    vocab_multiple: int = MEGATRON_VOCAB_MULTIPLE,
) -> tuple[RankLayout, ...]:
    """One layout per Megatron rank. ValueError names the axis and both numbers of whatever does not divide."""
    if shape.num_experts % mesh.ep:
        raise ValueError(f"trainer layout {mesh}: {shape.num_experts} experts do not divide by ep={mesh.ep}")
    layouts = []
    patterns = Patterns(family, shape)
    # All cuts of a parameter are equal.
    alike: dict[tuple[int, int], tuple[TrainerParams[ShapeT], list[BufferSpec]]] = {}
    for rank in range(mesh.world_size):
        coords = trainer_coords(mesh, rank)
        if (at := (coords["pp"], coords["ep"])) not in alike:
            names = trainer_names(family, shape, mesh, coords)
            params, buffers = _buckets(patterns, names, coords, bucket_elements, shape.vocab, vocab_multiple)
            alike[at] = TrainerParams(patterns, params, buffers, f"trainer rank {rank}"), buffers
        held, buffers = alike[at]
        owned = _owned(buffers, coords) if ownership == "slice" else None
        layouts.append(
            held.layout(rank=rank, world_size=mesh.world_size, coords=coords, ownership=ownership, owned=owned)
        )
    return tuple(layouts)


def engine_layouts(
    family: Names[ShapeT], shape: ShapeT, mesh: Mesh, expert_map: ExpertMap | None = None
) -> tuple[RankLayout, ...]:
    """One layout per vLLM rank. ValueError names the axis and both numbers of whatever does not divide.

    `expert_map` stands in the place of the mesh's placement.
    """
    patterns = Patterns(family, shape)
    stages = [layers_of_names(family, shape, engine_stage_layers(mesh, shape.num_layers, s)) for s in range(mesh.pp)]
    layouts = []
    alike: dict[tuple[int, int], EngineParams[ShapeT]] = {}
    for rank in range(mesh.world_size):
        coords = engine_coords(mesh, rank)
        dealt = None if expert_map else local_experts(shape.num_experts, mesh.ep, coords["ep"], mesh.placement)
        # As many experts: equal shapes. With a map ranks differ in every layer, so each is described by itself.
        at = coords["pp"], coords["ep"] if dealt is None else len(dealt)
        if at not in alike:
            names = stages[coords["pp"]]
            params, unused = engine_params(
                family, shape, mesh, coords, names=names, patterns=patterns, expert_map=expert_map
            )
            alike[at] = EngineParams(patterns, params, unused, f"engine rank {rank}")
        layouts.append(alike[at].layout(rank=rank, world_size=mesh.world_size, coords=coords, experts=dealt))
    return tuple(layouts)


def layers_of_names(family: Names[ShapeT], shape: ShapeT, layers: Iterable[int]) -> dict[str, int]:
    """vLLM's names inside these layers, each with its layer."""
    return {name: layer for layer in layers for name in family.engine_names(shape, (layer,))}


def trainer_names(family: Names[ShapeT], shape: ShapeT, mesh: Mesh, coords: Mapping[str, int]) -> list[str]:
    """Canonical names of a Megatron rank's parameters in registration order: embedding, layers, norm, layers of
    multi-token prediction, head."""
    num_local = shape.num_experts // mesh.ep
    experts = range(coords["ep"] * num_local, (coords["ep"] + 1) * num_local)
    outer = family.outer_names("trainer", shape)
    first, last = coords["pp"] == 0, coords["pp"] == mesh.pp - 1
    mtp: Sequence[int] = range(shape.num_layers, shape.num_layers + shape.mtp_layers) if last else ()
    names = [outer["embed"]] if first or mtp else []
    names.extend(family.trainer_names(shape, trainer_stage_layers(mesh, shape.num_layers, coords["pp"]), experts))
    if last:
        names.append(outer["norm"])
        names.extend(family.trainer_names(shape, mtp, experts))
        # Tied: the last stage keeps a second copy, unless it is also the first.
        names.extend([outer["head"]] if not (shape.tied and first) else [])
    return names


def _buckets(
    patterns: Patterns[ShapeT],
    names: Iterable[str],
    coords: dict[str, int],
    bucket_elements: int,
    vocab: int,
    vocab_multiple: int,
) -> tuple[list[TrainerParam], list[BufferSpec]]:
    """Megatron's buckets: parameters in reverse order, dense and expert ones apart when ep > 1.

    What changes behind the optimizer's step (kind "late") is in no bucket of Megatron's: here it has one of its own.
    """
    params: list[TrainerParam] = []
    sizes: dict[str, int] = {}
    dtypes: dict[str, str] = {}
    counts = {"dense": 0, "expert": 0, "late": 0}
    cuts = coords_cut(coords, "tp"), coords_cut(coords, "etp")
    padded_vocab = _round_up(vocab, vocab_multiple * coords["tp_size"])
    for name in reversed(list(names)):
        entry = patterns.trainer_entry(name)
        padded = padded_vocab if entry.rule == "vocab" else 0
        local = patterns.trainer(name, *cuts, padded)[0].shape
        group = "expert" if entry.kind == "expert" and coords["ep_size"] > 1 else "dense"
        group = "late" if entry.kind == "late" else group
        buffer = f"{group}{counts[group]}"
        dtypes[buffer] = entry.dtype
        offset = _round_up(sizes.get(buffer, 0), _PARAM_ALIGNMENT)
        params.append(TrainerParam(name, local, buffer, offset))
        sizes[buffer] = offset + prod(local)
        if sizes[buffer] >= bucket_elements:
            counts[group] += 1
    owners = {"expert": coords["edp_size"], "dense": coords["dp_size"] * coords["cp_size"], "late": 1}
    buffers = [
        BufferSpec(name, _round_up(size, _BUCKET_ALIGNMENT * owners[name.rstrip("0123456789")]), dtypes[name])
        for name, size in sizes.items()
    ]
    return params, buffers


def _owned(buffers: Iterable[BufferSpec], coords: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The distributed optimizer's slice of every bucket: equal parts over the ranks that hold the same parameters.

    What no optimizer steps is every rank's.
    """
    owned: dict[str, tuple[int, int]] = {}
    for buffer in buffers:
        if buffer.name.startswith("late"):
            index, size = 0, 1
        elif buffer.name.startswith("expert"):
            index, size = coords["edp"], coords["edp_size"]
        else:
            index, size = coords["dp"] * coords["cp_size"] + coords["cp"], coords["dp_size"] * coords["cp_size"]
        part = buffer.num_elements // size
        owned[buffer.name] = index * part, (index + 1) * part
    return owned


def engine_params(
    family: Names[ShapeT],
    shape: ShapeT,
    mesh: Mesh,
    coords: Mapping[str, int],
    *,
    names: Mapping[str, int] | None = None,
    patterns: Patterns[ShapeT] | None = None,
    expert_map: ExpertMap | None = None,
) -> tuple[list[EngineParam], list[str]]:
    """All live parameters of the vLLM rank at `coords`, and the names of those that no step of it reads.

    `names` inside layers (`layers_of_names`), and `patterns`, are shared by whoever asks for many ranks.
    """
    patterns = patterns or Patterns(family, shape)
    if expert_map is None and 0 < shape.num_experts < mesh.ep:
        raise ValueError(f"engine layout {mesh}: {shape.num_experts} experts for ep={mesh.ep} ranks; each needs one")
    if names is None:
        names = layers_of_names(family, shape, engine_stage_layers(mesh, shape.num_layers, coords["pp"]))
    outer = family.outer_names("engine", shape)
    first, last = coords["pp"] == 0, coords["pp"] == mesh.pp - 1
    # A tied head is the embedding itself on a lone stage.
    if shape.tied and first and last:
        del outer["head"]
    idle = {kind for kind in outer if not (first if kind == "embed" else last)}
    spares = family.engine_spares()
    outer = {kind: name for kind, name in outer.items() if kind not in idle or kind in spares}
    dealt = local_experts(shape.num_experts, mesh.ep, coords["ep"], mesh.placement)
    padded = _round_up(_round_up(shape.vocab, VLLM_VOCAB_MULTIPLE), mesh.tp)
    cuts, params = engine_cuts(coords), []
    for name in (*outer.values(), *names):
        slots = None
        if patterns.stacks_experts(name):
            slots = dealt if expert_map is None else expert_map.held(names[name], mesh.ep, coords["ep"])
        pattern, _ = place_engine_param(patterns, name, cuts, slots, padded)
        dtype = patterns.engine_entry(name, None if slots is None else slots[0]).dtype
        params.append(EngineParam(name, pattern.shape, dtype, slots))
    return params, [name for kind, name in outer.items() if kind in idle]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
