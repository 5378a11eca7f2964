"""Tagged weights through the plan, against arrays cut by hand: every engine element, written exactly once."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastream.layout.engine import whole_rank_layout
from tests.helpers.layout_reference import Model, config, qwen2_config
from tests.helpers.layout_world import differing, execute, make_world, view

MODEL = cache(lambda **changes: Model(config(**changes)))

TOPOLOGIES = [
    # trainer, its stages, engine, its stages
    ("tp1", (7,), "tp1", (7,)),
    ("pp2 ep2", (4, 3), "pp2", (4, 3)),
    ("pp3 ep4 dp4", (3, 2, 2), "tp2 ep2", (7,)),
    ("tp2 etp1 pp2 ep4 dp2", (3, 4), "tp4 pp3", (2, 3, 2)),
    ("tp4 etp2 ep2 dp1", (7,), "tp8 ep8", (7,)),
    ("tp2 ep2 dp2 pp7", (1,) * 7, "tp4 ep4 pp2", (4, 3)),
    ("tp1 etp2 ep2 dp4", (7,), "tp2 pp3", (2, 3, 2)),
]


@pytest.mark.parametrize("ownership", ["replica", "slice"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t[0]} to {t[2]}".replace(" ", "-"))
def test_every_engine_element_arrives_once(topology: tuple, ownership: str) -> None:
    trainer, stages, engine, engine_stages = topology
    world = make_world(
        MODEL(), trainer, engine, trainer_stages=stages, engine_stages=engine_stages, ownership=ownership
    )
    plan = world.plan()
    assert differing(world, plan) == []
    used = sum(int((~np.isnan(array)).sum()) for array in world.expected.values())
    assert sum(plan.elements.values()) == used and plan.payload_bytes == 4 * used
    assert sum(plan.tensors.values()) == sum(not np.isnan(array).all() for array in world.expected.values())


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("ownership", ["replica", "slice"])
def test_biases_and_shared_experts_of_qwen2(ownership: str, te: bool) -> None:
    """Shared experts are cut by tp, also where the routed ones are not (etp1) or are whole (expert parallel engine)."""
    for trainer, engine, stages in (("tp2 etp1 ep2 pp2", "pp3", (2, 3, 2)), ("tp2 ep2 pp2", "tp2 ep2", (7,))):
        world = make_world(
            Model(qwen2_config(mlp_only_layers=(3,))),
            trainer,
            engine,
            trainer_stages=(4, 3),
            engine_stages=stages,
            ownership=ownership,
            te=te,
        )
        assert differing(world, world.plan()) == []


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": True}, {"mlp_only_layers": (0, 1, 4)}], ids=["tied", "dense"]
)
def test_tied_head_dense_layers_and_te_names(changes: dict, te: bool) -> None:
    for engine, stages in (("pp3", (2, 3, 2)), ("tp2 ep2", (7,))):
        world = make_world(
            MODEL(**changes), "tp2 etp1 ep2 pp2", engine, trainer_stages=(4, 3), engine_stages=stages, te=te
        )
        assert differing(world, world.plan()) == []


@pytest.mark.parametrize("piece_bytes", [4, 52, 4 * 997, 4 * 48 * 40, 4 * 48 * 40 + 1, 1 << 30])
def test_any_piece_size_gives_the_same_bytes(piece_bytes: int) -> None:
    """S10: groups that share an engine tensor survive any cut, also one smaller than every tensor."""
    model = Model(config(num_hidden_layers=1, num_experts=2, hidden_size=16, vocab_size=77, moe_intermediate_size=6))
    world = make_world(model, "ep2", "tp2", trainer_stages=(1,), engine_stages=(1,), bucket=300)
    plan = world.plan(piece_bytes=piece_bytes)
    assert differing(world, plan) == []
    assert max(piece.num_bytes for piece in plan.pieces) <= piece_bytes
    assert sum(plan.tensors.values()) == len(world.expected)


def test_swapped_gate_and_up_is_seen() -> None:
    """L06, the negative control: the fixture is not symmetric, so a swap cannot hide."""
    world = make_world(MODEL(), "ep2", "tp2", trainer_stages=(7,), engine_stages=(7,), swap=True)
    wrong = differing(world, world.plan())
    assert len(wrong) == 7 * 2 and all("w13_weight" in name for name in wrong)


def test_more_ranks_than_key_value_heads() -> None:
    """L03: engine ranks 0 to 3 hold key/value head 0, ranks 4 to 7 head 1, complete."""
    model = MODEL()
    world = make_world(model, "tp2 ep2", "tp8 ep8", trainer_stages=(7,), engine_stages=(7,))
    targets, _ = execute(world.plan(), world)
    for name, first in (("k", 10), ("v", 20)):
        full = model.tensors[f"model.layers.3.self_attn.{name}_proj.weight"]
        for rank in range(8):
            rows = targets[rank, "model.layers.3.self_attn.qkv_proj.weight"].reshape(-1, 48)[first : first + 10]
            assert np.array_equal(rows, full[rank // 4 * 10 :][:10])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("engine", "tied"), [("tp1", False), ("tp2", False), ("tp4", True)])
def test_vocabulary_padding_never_travels(tp: int, engine: str, tied: bool) -> None:
    """L10: padding depends on the topology; whatever it is, 101 rows arrive and the engine's own padding stays."""
    model = Model(config(num_hidden_layers=1, num_experts=2, tie_word_embeddings=tied))
    world = make_world(model, f"tp{tp} etp1", engine, trainer_stages=(1,), engine_stages=(1,), pad=64)
    plan = world.plan()
    assert differing(world, plan) == []
    names = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    assert sum(num for (unit, _), num in plan.elements.items() if unit in ("s0.embed", "s0.head")) == 101 * 48 * len(
        names
    )


def test_twelve_experts_land_under_their_own_number() -> None:
    """L18: global, not local ids, and numbers, not text (10 sorts before 2)."""
    model = MODEL()
    world = make_world(model, "ep4 dp4", "tp2 ep2", trainer_stages=(7,), engine_stages=(7,))
    targets, _ = execute(world.plan(), world)
    for expert in range(12):
        down = targets[expert // 6, "model.layers.2.mlp.experts.routed_experts.w2_weight"].reshape(6, 48, 20)
        assert np.array_equal(down[expert % 6], model.tensors[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"])


def test_whole_plan_sends_full_tensors_to_the_loader() -> None:
    """Plan kind `whole`: every engine rank gets full tensors under their Hugging Face names, from the owned shards."""
    model = MODEL()
    world = make_world(model, "tp2 etp1 ep2 pp2", "pp2", trainer_stages=(4, 3), engine_stages=(4, 3), ownership="slice")
    wanted = [name for name in model.tensors if "layers.6." in name or name == "lm_head.weight"]
    names = [[name for name in model.tensors if name not in wanted], wanted]
    world.engine = [
        whole_rank_layout(model.family, model.shape, rank=rank, world_size=2, coords={"pp": rank}, names=names[rank])
        for rank in range(2)
    ]
    world.expected = {(rank, name): model.tensors[name] for rank in range(2) for name in names[rank]}
    assert differing(world, world.plan()) == []


def test_shards_load_a_checkpoint_into_the_trainer() -> None:
    """The reverse direction needs nothing new: each shard says which box fills which strided region."""
    model = MODEL()
    world = make_world(model, "tp2 etp1 ep2 pp2", "tp1", trainer_stages=(4, 3), engine_stages=(7,))
    for layout in world.trainer:
        loaded = {spec.name: np.full(spec.num_elements, np.nan, np.float32) for spec in layout.buffers}
        for shard in layout.shards:
            region = view(loaded[shard.buffer], shard.box.shape, shard.offset, shard.strides)
            region[...] = model.tensors[shard.tensor][tuple(map(slice, shard.box.lo, shard.box.hi))]
        for name, array in loaded.items():
            assert np.array_equal(array, world.sources[layout.rank, name], equal_nan=True)


@st.composite
def topologies(draw: st.DrawFn) -> tuple[str, tuple[int, ...], str, tuple[int, ...]]:
    """Valid pairs of layouts for 3 layers, 4 experts, 4 query and 2 key/value heads."""
    tp, etp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 2), (4, 2)]))
    # Without ep Megatron would reduce unlike shards of experts with each other where etp > tp, in its dense buckets.
    ep, extra = draw(st.sampled_from([1, 2, 4] if etp <= tp else [2, 4])), draw(st.sampled_from([1, 2]))
    dp = max(etp * ep // tp, 1) * extra
    dp = dp if tp * dp % (etp * ep) == 0 else dp * 2
    splits = [(3,), (1, 2), (2, 1), (1, 1, 1)]
    stages, engine_stages = draw(st.sampled_from(splits)), draw(st.sampled_from(splits))
    engine_tp = draw(st.sampled_from([1, 2, 4]))
    engine_ep = draw(st.sampled_from([1, engine_tp]))
    engine = f"tp{engine_tp} ep{engine_ep} pp{len(engine_stages)}"
    return f"tp{tp} etp{etp} ep{ep} dp{dp} pp{len(stages)}", stages, engine, engine_stages


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    topology=topologies(),
    ownership=st.sampled_from(["replica", "slice"]),
    tied=st.booleans(),
    te=st.booleans(),
    bucket=st.sampled_from([1, 500, 5000, 1 << 30]),
    piece_bytes=st.sampled_from([64, 1000, 1 << 20]),
    experts_per_unit=st.integers(1, 5),
)
def test_any_layouts(topology, ownership, tied, te, bucket, piece_bytes, experts_per_unit) -> None:
    small = MODEL(
        num_hidden_layers=3,
        hidden_size=6,
        num_attention_heads=4,
        head_dim=2,
        num_experts=4,
        moe_intermediate_size=8,
        vocab_size=11,
        tie_word_embeddings=tied,
    )
    trainer, stages, engine, engine_stages = topology
    world = make_world(
        small,
        trainer,
        engine,
        trainer_stages=stages,
        engine_stages=engine_stages,
        ownership=ownership,
        te=te,
        bucket=bucket,
        pad=4,
    )
    plan = world.plan(piece_bytes, experts_per_unit)
    assert differing(world, plan) == []
    assert max(piece.num_bytes for piece in plan.pieces) <= piece_bytes
