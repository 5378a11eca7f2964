"""Experts that do not lie linearly on an engine: in turns, or by a map in which some are there more than once."""

from __future__ import annotations

import importlib
import importlib.util
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastream.families import FAMILIES
from megastream.layout.expert_slots import ExpertMap, local_experts
from megastream.layout.mesh import Mesh, parse_engine_mesh, parse_trainer_mesh
from megastream.layout.shard import RankLayout
from megastream.layout.synthetic import engine_layouts, trainer_layouts
from megastream.plan import CoverageError, Plan, build_plan, prove_coverage
from tests.helpers.layout_reference import Placement, any_placement, awkward, tiny, vllm_experts
from tests.helpers.layout_world import World, differing, execute, make_world
from tests.unit.test_family_pairs import Pair, all_pairs, check

WITH_EXPERTS = [family for family in FAMILIES if tiny(family, False).num_experts]
HEARTS = ("qwen3_moe", "gpt_oss")
"""A tensor for each expert, and one for all of them."""
PAIRS = [pair for pair in all_pairs() if "ep" in pair[2]]
PAIRS += [(*pair[:2], f"dp3 ep3 pp{len(pair[3])}", pair[3]) for pair in PAIRS[::9]]
"""With 4 experts: three ranks do not have as many each."""
DOWN = "model.layers.{}.mlp.experts.routed_experts.w2_weight"


def expert_map(placement: Placement) -> ExpertMap | None:
    return None if isinstance(placement, str) else ExpertMap(dict(enumerate(map(tuple, placement))))


def mesh_of(pair: Pair, placement: Placement) -> Mesh:
    mesh = replace(parse_engine_mesh(pair[2]), stages=pair[3])
    return replace(mesh, placement="round_robin") if placement == "round_robin" else mesh


def inside_layers(layout: RankLayout) -> list[tuple]:
    found = [(s.buffer, s.offset, s.tensor, s.box, s.strides) for s in layout.shards if ".layers." in s.tensor]
    return sorted(found, key=lambda shard: shard[:3])


@pytest.mark.parametrize(
    "family", [each if each in HEARTS else pytest.param(each, marks=pytest.mark.full) for each in WITH_EXPERTS]
)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    pair=st.sampled_from(PAIRS),
    seed=st.integers(0, 1 << 32),
    ownership=st.sampled_from(["replica", "slice"]),
    te=st.booleans(),
    bucket=st.sampled_from([500, 1 << 30]),
    experts_per_unit=st.integers(1, 5),
)
def test_experts_anywhere_arrive_once_in_every_slot(
    family, pair, seed, ownership, te, bucket, experts_per_unit
) -> None:
    """Element by element against arrays cut by hand; and the layouts that `megastream plan` makes are those."""
    model = tiny(family, False)
    placement = any_placement(random.Random(seed), model, parse_engine_mesh(pair[2]).ep)
    options = dict(bucket=bucket, experts_per_unit=experts_per_unit, placement=placement)
    world = check(model, pair, ownership, te, **options)
    ours = engine_layouts(model.family, model.shape, mesh_of(pair, placement), expert_map(placement))
    for one, hand in zip(ours, world.engine, strict=True):
        assert inside_layers(one) == inside_layers(hand) and one.coords == hand.coords
        assert {spec.name for spec in one.tensors} == {spec.name for spec in hand.tensors}
        assert len({spec.name for spec in one.tensors}) == len(one.tensors)


def test_the_placements_that_are_drawn() -> None:
    """In turns, maps without and with redundant experts, twice on one rank, alike in all layers and not."""
    model, found = tiny("qwen3_moe", False), set()
    for seed in range(40):
        placement = any_placement(random.Random(seed), model, 2)
        if isinstance(placement, str):
            found.add(placement)
            continue
        assert all(set(row) == {0, 1, 2, 3} and len(row) % 2 == 0 for row in placement)
        halves = [half for row in placement for half in (row[: len(row) // 2], row[len(row) // 2 :])]
        found.add("twice on a rank" if any(len(set(half)) < len(half) for half in halves) else "once on a rank")
        found.add("redundant" if len(placement[0]) > 4 else "moved")
        found.add("alike" if placement[0] == placement[1] == placement[2] else "not alike")
    assert found == {"round_robin", "twice on a rank", "once on a rank", "redundant", "moved", "alike", "not alike"}


def planned(engine: str, expert_map: ExpertMap | None = None) -> Plan:
    model = awkward("qwen3_moe")
    trainer = trainer_layouts(model.family, model.shape, parse_trainer_mesh("pp2(4,3) ep2"))
    mine = engine_layouts(model.family, model.shape, parse_engine_mesh(engine), expert_map)
    return build_plan(
        trainer, mine, model.family, kind="stream", piece_bytes=1 << 16, experts_per_unit=4, finality="pipelined"
    )


def test_a_placement_written_as_a_map_is_the_same_plan() -> None:
    """One digest, however the placement is said; and another one for another placement."""
    linear, in_turns = list(range(12)), [*range(0, 12, 2), *range(1, 12, 2)]
    plans = {"linear": planned("tp2 ep2"), "turns": planned("tp2 ep2 round_robin")}
    for kind, slots in (("linear", linear), ("turns", in_turns)):
        plan = planned("tp2 ep2", ExpertMap(dict.fromkeys(range(7), tuple(slots))))
        assert plan.digest == plans[kind].digest and tuple(plan.pieces) == tuple(plans[kind].pieces)
    assert plans["linear"].digest != plans["turns"].digest
    assert plans["linear"].payload_bytes == plans["turns"].payload_bytes


BEFORE, AFTER = [0, 1, 2, 3, 0, 1], [0, 2, 1, 3, 2, 2]


def under(slots: list[int], engine: str) -> World:
    """4 experts in 6 slots of every layer."""
    return make_world(
        tiny("qwen3_moe", False),
        "pp2 ep2",
        engine,
        trainer_stages=(2, 1),
        engine_stages=(3,),
        pad=4,
        placement=[slots] * 3,
    )


@pytest.mark.parametrize("engine", ["tp2 ep2", "dp3 ep3"])
def test_a_map_that_changed_between_two_attachments_is_another_plan(engine: str) -> None:
    """L20, its pure part. After the map has changed every slot gets its own expert, in versions that tell the updates
    apart, and the old plan is refused against the new layouts, by tensor. What else the row asks for cannot come about
    live: an engine that may rebalance (EPLB) is refused before it is described (`tests/engine/test_room.py`).
    """
    one, two = under(BEFORE, engine), under(AFTER, engine)
    old, new = one.plan(), two.plan()
    assert old.digest != new.digest
    assert differing(one, old) == []
    later = 1 << 20
    two.sources = {key: array + later for key, array in two.sources.items()}
    two.expected = {key: array + later for key, array in two.expected.items()}
    assert differing(two, new) == []
    targets, _ = execute(new, two)
    for layer in range(3):
        held = np.concatenate([targets[rank, DOWN.format(layer)] for rank in range(len(two.engine))])
        for slot, expert in zip(held.reshape(len(AFTER), 6, 8), AFTER, strict=True):
            full = two.model.tensors[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"]
            assert np.array_equal(slot, full + later)
    stale = replace(two, engine=one.engine)
    moved = [each for each in differing(stale, stale.plan()) if "routed_experts" in each]
    assert len(moved) >= 2 * 3, "a plan by the old map must show here, in both stacks of each layer"
    with pytest.raises(CoverageError, match=r"mlp\.experts\.\d+\..*engine rank"):
        prove_coverage(old.pieces, two.trainer, two.engine)


def test_a_map_without_an_expert_is_no_plan() -> None:
    """Whoever makes layouts with a wrong map is told by the plan's own checks."""
    slots = ExpertMap(dict.fromkeys(range(7), (0, *range(11))))
    with pytest.raises(ValueError, match=r"21 tensors are held by the trainer, not the engine: .*mlp\.experts\.11\."):
        planned("tp2 ep2", slots)
    with pytest.raises(ValueError, match="expert 12 of a model with 12 experts"):
        planned("tp2 ep2", ExpertMap(dict.fromkeys(range(7), (*range(13), 0))))


def test_experts_of_a_rank_are_counted_one_by_one() -> None:
    for num, ep, placement in ((4, 3, "linear"), (4, 3, "round_robin"), (12, 4, "round_robin"), (5, 5, "round_robin")):
        model = SimpleNamespace(num_experts=num)
        ours = [local_experts(num, ep, rank, placement) for rank in range(ep)]
        assert ours == [tuple(vllm_experts(model, 0, rank, ep, placement)) for rank in range(ep)]
        assert sorted(expert for each in ours for expert in each) == list(range(num))


@pytest.mark.full
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_experts_of_a_rank_are_those_of_vllm(placement: str) -> None:
    """Also which placement it has where it is asked for turns: only with several groups, and no redundant experts."""
    manager = importlib.import_module("vllm.model_executor.layers.fused_moe.expert_map_manager")
    for num in range(1, 14):
        for ep in range(2, num + 1):
            for rank in range(ep):
                count, found, _ = manager.determine_expert_map(ep, rank, num, placement)
                slots = {int(slot): expert for expert, slot in enumerate(found.tolist()) if slot >= 0}
                assert local_experts(num, ep, rank, placement) == tuple(slots[slot] for slot in range(count))
    for kernels, groups, redundant, expected in (
        ((False, False), 8, 0, placement),
        ((False, False), 1, 0, "linear"),
        ((False, False), None, 0, "linear"),
        ((False, False), 8, 2, "linear"),
        ((True, True), 8, 0, placement),
        ((True, False), 8, 0, "linear"),
    ):
        parallel = SimpleNamespace(
            use_all2all_kernels=kernels[0], needs_round_robin_routing_tables=kernels[1], all2all_backend="x"
        )
        ask = manager.determine_expert_placement_strategy
        assert ask(placement, parallel, groups, redundant, redundant > 0) == expected


VLLM_FILES = {"deepseek_v3": "deepseek_v2"}
"""Where a family's model in vLLM has another name."""


@pytest.mark.parametrize("family", FAMILIES)
def test_families_place_experts_as_vllm_s_models_do(family: str) -> None:
    """Read in vLLM's source: whether the model tells its layer of experts of groups, and of EPLB."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "model_executor" / "models"
    source = (folder / f"{VLLM_FILES.get(family, family)}.py").read_text()
    assert (FAMILIES[family].num_groups is not None) == ("num_expert_group=" in source)
    assert FAMILIES[family].has_eplb == ("enable_eplb=" in source)
