"""Every family under hundreds of pairs of layouts, against arrays cut by hand: each element arrives once.

Weights are tagged, so that any swap shows; targets are NaN before, so that any element left out shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastream.convert.model import Model as FileModel
from megastream.convert.run import plan_between
from megastream.families import FAMILIES
from megastream.layout.mesh import Mesh, parse_engine_mesh, parse_trainer_mesh
from tests.helpers.layout_reference import Model, Placement, any_placement, awkward, tiny
from tests.helpers.layout_world import World, differing, from_hf, make_world, turned

NUM_PAIRS = 500
Pair = tuple[str, tuple[int, ...], str, tuple[int, ...]]
"""Trainer, its stages (virtual ones in the order of the pipeline), engine, its stages."""

AWKWARD = [
    # 7 layers; who sends, Transformer Engine's names
    pytest.param(("tp2 etp1 pp2 ep2", (4, 3), "tp2 ep2", (7,)), "slice", True),
    pytest.param(("pp3 ep4 dp4", (3, 2, 2), "tp2 ep2", (7,)), "replica", True, marks=pytest.mark.full),
    pytest.param(("tp2 etp1 pp2 ep4 dp2", (3, 4), "tp4 pp3", (2, 3, 2)), "slice", False, marks=pytest.mark.full),
    pytest.param(("tp4 etp2 ep2 dp1", (7,), "tp8 ep8", (7,)), "replica", False, marks=pytest.mark.full),
    pytest.param(("tp1 dp3", (7,), "pp3", (2, 3, 2)), "slice", True, marks=pytest.mark.full),
    pytest.param(("cp2 ep2 dp2", (7,), "tp2 dp4 ep8", (7,)), "slice", False, marks=pytest.mark.full),
    pytest.param(("ep2 pp2 vpp2", (2, 1, 3, 1), "tp2 pp2", (3, 4)), "slice", True, marks=pytest.mark.full),
    pytest.param(("tp2 pp3", (0, 7, 0), "tp2 ep2", (7,)), "replica", False, marks=pytest.mark.full),
]

FEATURES: dict[str, Callable[[Mesh, Mesh, Pair], bool]] = {
    "expert tensor parallelism unlike tensor parallelism": lambda t, e, pair: t.etp != t.tp,
    "no expert parallelism, and replicas": lambda t, e, pair: t.ep == 1 and t.dp > 1,
    "context parallelism": lambda t, e, pair: t.cp > 1,
    "uneven stages of the trainer": lambda t, e, pair: len(set(pair[1])) > 1,
    "virtual stages": lambda t, e, pair: t.vpp > 1,
    "stages without layers": lambda t, e, pair: 0 in pair[1],
    "uneven stages of the engine": lambda t, e, pair: len(set(pair[3])) > 1,
    "more engine ranks than key/value heads": lambda t, e, pair: e.tp > 2,
    "expert parallelism on both sides": lambda t, e, pair: t.ep > 1 and e.ep > 1,
    "engine replicas that share experts": lambda t, e, pair: e.dp > 1 and e.ep > 1,
    "engine replicas that cut experts": lambda t, e, pair: e.dp > 1 and e.ep == 1,
}
LEAST = 20
"""Pairs with each of these, at least."""
FEW = 3
"""Pairs of each family that go the other way with the default tests."""


@cache
def all_pairs() -> list[Pair]:
    """Every valid pair of layouts for 3 layers, 4 experts, 4 query and 2 key/value heads, up to 2 * ep replicas."""
    splits = [(3,), (1, 2), (2, 1), (1, 1, 1)]
    stages = {1: [*splits, (0, 3), (1, 2, 0)], 2: [(1, 1, 1, 0), (0, 1, 1, 1)]}  # by vpp
    trainers = []
    cuts = [(1, 1), (2, 1), (2, 2), (1, 2), (4, 2), (4, 1)]
    for (tp, etp), ep, more, cp in product(cuts, (1, 2, 4), (1, 2), (1, 2)):
        dp = max(etp * ep // tp, 1) * more
        dp = dp if tp * dp % (etp * ep) == 0 else dp * 2
        if ep == 1 and etp > tp:
            continue  # Megatron would reduce unlike shards of experts with each other, in its dense buckets
        if cp > 1 and more > 1:
            continue
        size = f"tp{tp} cp{cp} etp{etp} ep{ep} dp{dp}"
        trainers += [(f"{size} pp{len(each) // vpp} vpp{vpp}", each) for vpp in stages for each in stages[vpp]]
    sizes = ["tp1", "tp2", "tp2 ep2", "tp4", "tp4 ep4", "dp2 ep2", "tp2 dp2 ep4", "tp2 dp2"]
    engines = [(f"{size} pp{len(stages)}", stages) for size, stages in product(sizes, splits)]
    return [(*trainer, *engine) for trainer, engine in product(dict.fromkeys(trainers), engines)]


def check(
    model: Model,
    pair: Pair,
    ownership: str,
    te: bool,
    *,
    bucket: int = 30_000,
    piece_bytes: int = 1 << 12,
    experts_per_unit: int = 2,
    pad: int = 4,
    placement: Placement = "linear",
) -> World:
    """Every element of every engine rank arrives once, into targets that were NaN, and no byte more travels."""
    trainer, stages, engine, engine_stages = pair
    world = make_world(
        model,
        trainer,
        engine,
        trainer_stages=stages,
        engine_stages=engine_stages,
        ownership=ownership,
        te=te,
        bucket=bucket,
        pad=pad,
        placement=placement,
    )
    plan = world.plan(piece_bytes, experts_per_unit)
    assert differing(world, plan) == [], (pair, placement)
    needed = sum(int((array == array).sum()) for array in world.expected.values())
    assert plan.payload_bytes == 4 * needed and sum(plan.elements.values()) == needed, (pair, placement)
    return world


def check_back(model: Model, pair: Pair, te: bool, *, pad: int = 4) -> None:
    """The other way round: from the engine's ranks, and from Hugging Face's tensors, into trainer buffers of NaN.

    Every element arrives once on every trainer rank that has it; padded rows stay as they were.
    """
    trainer, stages, engine, engine_stages = pair
    sizes = dict(trainer_stages=stages, engine_stages=engine_stages, te=te, pad=pad)
    world = make_world(model, trainer, engine, alone=True, **sizes)
    files = FileModel(model.family, model.shape, Path())
    for back in (turned(world), from_hf(world)):
        plan = plan_between(back.trainer, back.engine, files)
        assert differing(back, plan) == [], pair
        needed = sum(int((array == array).sum()) for array in back.expected.values())
        assert plan.payload_bytes == 4 * needed, pair


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("pair", "ownership", "te"), AWKWARD)
def test_awkward_sizes_arrive_once(family: str, pair: Pair, ownership: str, te: bool) -> None:
    check(awkward(family), pair, ownership, te, piece_bytes=1 << 16, pad=8)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    pair=st.sampled_from(all_pairs()),
    ownership=st.sampled_from(["replica", "slice"]),
    tied=st.booleans(),
    te=st.booleans(),
    bucket=st.sampled_from([500, 1 << 30]),
    experts_per_unit=st.integers(1, 5),
)
def test_any_layouts(family, pair, ownership, tied, te, bucket, experts_per_unit) -> None:
    check(tiny(family, tied), pair, ownership, te, bucket=bucket, experts_per_unit=experts_per_unit)


def drawn(family: str) -> list[Pair]:
    """Those of the test below: the same ones in every run."""
    return random.Random(family).sample(all_pairs(), NUM_PAIRS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pairs_are_distinct_and_have_every_feature(family: str) -> None:
    pairs = drawn(family)
    meshes = [(parse_trainer_mesh(pair[0]), parse_engine_mesh(pair[2])) for pair in pairs]
    layouts = {(str(t), pair[1], str(e), pair[3]) for (t, e), pair in zip(meshes, pairs, strict=True)}
    assert len(layouts) >= NUM_PAIRS >= 500, "as layouts, not only as text"
    found = {
        feature: sum(has(t, e, pair) for (t, e), pair in zip(meshes, pairs, strict=True))
        for feature, has in FEATURES.items()
    }
    assert min(found.values()) >= LEAST, found


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_five_hundred_pairs_of_layouts(family: str) -> None:
    """Every fifth with 12 experts and a vocabulary of 101; of engines with expert parallelism half in any placement."""
    draw, done = random.Random(f"{family} options"), set()
    for number, pair in enumerate(drawn(family)):
        model = tiny(family, draw.random() < 0.5, number % 5 == 0)
        ownership, te = draw.choice(["replica", "slice"]), draw.random() < 0.5
        bucket, experts_per_unit = draw.choice([500, 1 << 30]), draw.randint(1, 5)
        ep, anywhere = parse_engine_mesh(pair[2]).ep, model.num_experts and draw.random() < 0.5
        placement = any_placement(draw, model, ep) if anywhere and ep > 1 else "linear"
        options = dict(bucket=bucket, experts_per_unit=experts_per_unit, placement=placement)
        check(model, pair, ownership, te, **options)
        done.add(pair)
    assert len(done) >= 500


@pytest.mark.parametrize("family", FAMILIES)
def test_the_other_way_round(family: str) -> None:
    """A few of the pairs of the test below."""
    draw = random.Random(f"{family} back")
    for pair in drawn(family)[:FEW]:
        check_back(tiny(family, draw.random() < 0.5), pair, draw.random() < 0.5)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_hundred_pairs_the_other_way_round(family: str) -> None:
    draw, done = random.Random(f"{family} back"), set()
    for number, pair in enumerate(drawn(family)[:200]):
        model = tiny(family, draw.random() < 0.5, number % 5 == 0)
        check_back(model, pair, draw.random() < 0.5)
        done.add(pair)
    assert len(done) == 200


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("pair", "ownership", "te"), AWKWARD)
def test_awkward_sizes_the_other_way_round(family: str, pair: Pair, ownership: str, te: bool) -> None:
    check_back(awkward(family), pair, te, pad=8)
