"""The planner works in columns and takes what is alike together; here it is held against the one that does neither."""

from __future__ import annotations

import random
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastream.layout.mesh import parse_engine_mesh
from tests.helpers.edits import replace
from tests.helpers.layout_reference import Model, any_placement, config
from tests.helpers.layout_world import make_world
from tests.helpers.slow_plan import slow_pieces
from tests.unit.test_plan_roundtrip import topologies

SMALL = dict(
    num_hidden_layers=3,
    hidden_size=6,
    num_attention_heads=4,
    head_dim=2,
    num_experts=4,
    moe_intermediate_size=8,
    vocab_size=11,
)
DOWN = "model.layers.{}.mlp.experts.0.down_proj.weight"
MODEL = cache(lambda **changes: Model(config(**SMALL, **changes)))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    topology=topologies(),
    ownership=st.sampled_from(["replica", "slice"]),
    changes=st.sampled_from([{}, {"tie_word_embeddings": True}, {"mlp_only_layers": (1,)}]),
    bucket=st.sampled_from([1, 500, 1 << 30]),
    piece_bytes=st.sampled_from([4, 60, 64, 1000, 1 << 20]),
    experts_per_unit=st.integers(1, 5),
    seed=st.none() | st.integers(0, 1 << 32),
)
def test_the_plan_is_that_of_planning_every_layer_by_itself(
    topology, ownership, changes, bucket, piece_bytes, experts_per_unit, seed
) -> None:
    """Every piece and every copy of it, in the same order, with the same choice among replicas."""
    trainer, stages, engine, engine_stages = topology
    model, ep = MODEL(**changes), parse_engine_mesh(engine).ep
    world = make_world(
        model,
        trainer,
        engine,
        trainer_stages=stages,
        engine_stages=engine_stages,
        ownership=ownership,
        bucket=bucket,
        pad=4,
        placement="linear" if seed is None or ep == 1 else any_placement(random.Random(seed), model, ep),
    )
    plan = world.plan(piece_bytes, experts_per_unit)
    expected = slow_pieces(world.trainer, world.engine, world.model.family.place, piece_bytes, experts_per_unit)
    assert tuple(plan.pieces) == expected
    assert plan.payload_bytes == sum(piece.num_bytes for piece in expected)
    for rank, pieces in plan.by_source.items():
        assert pieces == tuple(piece for piece in expected if piece.source == rank)
    for rank, pieces in plan.by_target.items():
        assert pieces == tuple(piece for piece in expected if piece.target == rank)


def test_one_layer_that_is_cut_differently_is_planned_differently() -> None:
    """Layers are alike only where all their shards are: another cut of one tensor on one rank must show."""
    world = make_world(MODEL(), "tp2 ep2 dp2", "tp2 ep2", trainer_stages=(3,), engine_stages=(3,))
    other = make_world(MODEL(), "tp2 ep2 dp2", "tp2", trainer_stages=(3,), engine_stages=(3,))
    for layout, cut in zip(list(world.engine), other.engine, strict=True):
        buffers = {spec.name: spec for spec in cut.buffers if "layers.1.mlp.experts" in spec.name}
        shards = [shard for shard in cut.shards if shard.buffer in buffers]
        shards += [shard for shard in layout.shards if shard.buffer not in buffers]
        specs = {spec.name: spec for spec in (*layout.tensors, *cut.tensors)}
        world.engine[layout.rank] = replace(
            layout,
            tensors=tuple(specs[name] for name in dict.fromkeys(shard.tensor for shard in shards)),
            buffers=tuple(buffers.get(spec.name, spec) for spec in layout.buffers),
            shards=tuple(shards),
        )
    plan = world.plan()
    assert tuple(plan.pieces) == slow_pieces(world.trainer, world.engine, world.model.family.place, 4096, 2)
    targets = {
        layer: {piece.target for piece in plan.pieces for copy in piece.copies if copy.tensor == DOWN.format(layer)}
        for layer in range(3)
    }
    assert targets == {0: {0}, 1: {0, 1}, 2: {0}}
