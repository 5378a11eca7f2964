"""Both sides of a conversion in memory: described layouts, filled buffers, and a wire simulated with numpy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from megastream.layout.box import Box
from megastream.layout.engine import EngineParam, engine_rank_layout
from megastream.layout.mesh import Mesh, engine_coords, parse_engine_mesh, parse_trainer_mesh, trainer_coords
from megastream.layout.pack import row_major_strides
from megastream.layout.shard import BufferSpec, RankLayout, Shard
from megastream.layout.trainer import TrainerParam, trainer_rank_layout
from megastream.plan import Plan, build_plan
from tests.helpers.layout_reference import (
    Arrays,
    Model,
    Placement,
    megatron_rank,
    split_layers,
    vllm_experts,
    vllm_rank,
)


@dataclass
class World:
    """Both sides of one conversion: layouts, filled trainer buffers, and what the engine must end up with."""

    model: Model
    trainer: list[RankLayout] = field(default_factory=list)
    engine: list[RankLayout] = field(default_factory=list)
    sources: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    expected: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    def plan(self, piece_bytes: int = 4096, experts_per_unit: int = 2) -> Plan:
        return build_plan(
            self.trainer,
            self.engine,
            self.model.family,
            kind="stream",
            piece_bytes=piece_bytes,
            experts_per_unit=experts_per_unit,
            finality="pipelined",
        )


def make_world(
    model: Model,
    trainer: str,
    engine: str,
    *,
    trainer_stages: tuple[int, ...],
    engine_stages: tuple[int, ...],
    ownership: Any = "replica",
    te: bool = False,
    bucket: int = 30_000,
    pad: int = 8,
    swap: bool = False,
    alone: bool = False,
    placement: Placement = "linear",
) -> World:
    """Fills NaN-poisoned trainer buffers (only what each rank owns) and describes both sides.

    `alone`: each parameter of the trainer is a buffer of its own, as in files, and `bucket` counts for nothing.
    """
    world = World(model)
    mesh, layers = parse_trainer_mesh(trainer), split_layers(model.raw["num_hidden_layers"], trainer_stages)
    for rank in range(mesh.world_size):
        at = trainer_coords(mesh, rank)
        own = [layer for chunk in range(mesh.vpp) for layer in layers[chunk * mesh.pp + at["pp"]]]
        params = megatron_rank(model, at, own, te, pad * mesh.tp, swap)
        _add_trainer(world, mesh, rank, params, 1 if alone else bucket, ownership, 0 if alone else 3)
    mesh, layers = parse_engine_mesh(engine), split_layers(model.raw["num_hidden_layers"], engine_stages)
    for rank in range(mesh.world_size):
        _add_engine(world, mesh, rank, layers, placement)
    return world


def turned(world: World) -> World:
    """From the engine's ranks to the trainer's, of a world whose trainer ranks own all that they hold."""
    return World(
        world.model,
        trainer=[replace(layout, side="trainer") for layout in world.engine],
        engine=[replace(layout, side="engine") for layout in world.trainer],
        sources={key: array.ravel() for key, array in world.expected.items()},
        expected=dict(world.sources),
    )


def from_hf(world: World) -> World:
    """From the full Hugging Face tensors to the trainer's ranks of such a world."""
    model = world.model
    specs = model.family.tensors(model.shape)
    hf = RankLayout(
        side="trainer",
        rank=0,
        world_size=1,
        coords={"pp": 0, "ep": 0},
        tensors=specs,
        buffers=tuple(BufferSpec(spec.name, prod(spec.shape), spec.dtype) for spec in specs),
        shards=tuple(
            Shard(spec.name, Box.full(spec.shape), 0, spec.name, 0, row_major_strides(spec.shape)) for spec in specs
        ),
    )
    back = turned(world)
    sources = {(0, name): array.ravel() for name, array in model.tensors.items()}
    return World(model, trainer=[hf], engine=back.engine, sources=sources, expected=back.expected)


def _add_trainer(world: World, mesh: Mesh, rank: int, arrays: Arrays, bucket: int, ownership: Any, gap: int) -> None:
    """Buckets as Megatron fills them: reverse order, experts apart when ep > 1, a gap behind each parameter."""
    at = trainer_coords(mesh, rank)
    contents: dict[str, list[tuple[str, np.ndarray]]] = {}
    counts = {"d": 0, "e": 0}
    for name, array in reversed(arrays.items()):
        group = "e" if mesh.ep > 1 and ".experts." in name else "d"
        key = f"{group}{counts[group]}"
        contents.setdefault(key, []).append((name, array))
        if sum(item.size for _, item in contents[key]) >= bucket:
            counts[group] += 1
    params, buffers, owned = [], [], {}
    for key, items in contents.items():
        dense = at["dp_size"] * at["cp_size"], at["dp"] * at["cp_size"] + at["cp"]
        owners, index = (at["edp_size"], at["edp"]) if key[0] == "e" else dense
        flat: list[np.ndarray] = []
        for name, array in items:
            params.append(TrainerParam(name, array.shape, key, sum(map(len, flat))))
            flat += [array.ravel(), np.full(gap, np.nan, np.float32)]
        data = np.concatenate(flat)
        data = np.concatenate([data, np.full(-len(data) % owners if gap else 0, np.nan, np.float32)])
        share = len(data) // owners
        owned[key] = index * share, (index + 1) * share
        if ownership == "slice":
            data[: owned[key][0]] = data[owned[key][1] :] = np.nan
        buffers.append(BufferSpec(key, len(data), "float32"))
        world.sources[rank, key] = data
    world.trainer.append(
        trainer_rank_layout(
            world.model.family,
            world.model.shape,
            rank=rank,
            world_size=mesh.world_size,
            coords=at,
            params=params,
            buffers=buffers,
            ownership=ownership,
            owned=owned,
        )
    )


def _add_engine(world: World, mesh: Mesh, rank: int, layers: list[list[int]], placement: Placement) -> None:
    at = engine_coords(mesh, rank)
    arrays, unused = vllm_rank(world.model, at, mesh.ep > 1, layers, placement)

    def slots(name: str) -> tuple[int, ...] | None:
        if "routed_experts" not in name:
            return None
        if mesh.ep == 1:
            return tuple(range(world.model.num_experts))
        layer, rank_of_experts = int(name.split(".")[2]), (at["dp"] * mesh.tp + at["tp"], mesh.dp * mesh.tp)
        return tuple(vllm_experts(world.model, layer, *rank_of_experts, placement))

    params = [EngineParam(name, array.shape, "float32", slots(name)) for name, array in arrays.items()]
    world.expected.update({(rank, name): array for name, array in arrays.items() if name not in unused})
    world.engine.append(
        engine_rank_layout(
            world.model.family,
            world.model.shape,
            rank=rank,
            world_size=mesh.world_size,
            coords=at,
            params=params,
            unused=unused,
        )
    )


def execute(plan: Plan, world: World) -> tuple[dict[tuple[int, str], np.ndarray], dict[tuple[int, str], np.ndarray]]:
    """Runs a plan over a simulated wire: NaN-poisoned targets after all writes, and how often each was written."""
    sizes = {(item.rank, spec.name): spec.num_elements for item in world.engine for spec in item.buffers}
    targets = {key: np.full(size, np.nan, np.float32) for key, size in sizes.items()}
    writes = {key: np.zeros(size, np.int64) for key, size in sizes.items()}
    for piece in plan.pieces:
        source = world.sources[piece.source, piece.source_buffer]
        payload = np.concatenate(
            [view(source, copy.shape, copy.source_offset, copy.source_strides).ravel() for copy in piece.copies]
        )
        assert payload.nbytes == piece.num_bytes and len(payload) == piece.num_elements
        at = 0
        for copy in piece.copies:
            key, num = (piece.target, copy.target_buffer), int(np.prod(copy.shape))
            place = copy.shape, copy.target_offset, copy.target_strides
            view(targets[key], *place)[...] = payload[at : at + num].reshape(copy.shape)
            view(writes[key], *place)[...] += 1
            at += num
    return targets, writes


def view(flat: np.ndarray, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> np.ndarray:
    """The strided region of a flat buffer; sizes in elements."""
    return as_strided(flat[offset:], shape, tuple(stride * flat.itemsize for stride in strides))


def differing(world: World, plan: Plan) -> list[str]:
    """Engine buffers that do not end up as expected, element by element; padding must stay untouched (NaN)."""
    targets, writes = execute(plan, world)
    assert set(targets) == set(world.expected)
    wrong = []
    for (rank, name), array in world.expected.items():
        expected = array.ravel()
        same = np.array_equal(targets[rank, name], expected, equal_nan=True)
        once = np.array_equal(writes[rank, name], (~np.isnan(expected)).astype(np.int64))
        wrong += [] if same and once else [f"{name} on rank {rank}"]
    return wrong
