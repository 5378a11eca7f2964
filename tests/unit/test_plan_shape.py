"""What a plan looks like: units, replica balance, order, digest, totals, cost, and the time it takes."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megastream.cli.plan import plan_command
from megastream.families import family_of, load_shape
from megastream.layout.mesh import parse_engine_mesh, parse_trainer_mesh
from megastream.layout.synthetic import engine_layouts, trainer_layouts
from megastream.plan import build_plan
from megastream.plan.cost import plan_cost
from megastream.plan.manifest import Totals, buffers_of_units, source_totals, target_totals
from tests.helpers.layout_reference import Model, config, qwen2_config
from tests.helpers.layout_world import World, make_world

OPTIONS = dict(kind="stream", piece_bytes=1 << 16, experts_per_unit=8, finality="pipelined")

TINY = dict(num_hidden_layers=1, num_experts=2)


@cache
def world(ownership: str = "replica") -> World:
    return make_world(
        Model(config(mlp_only_layers=(0,))),
        "pp2 ep2 dp4",
        "tp2 ep2",
        trainer_stages=(4, 3),
        engine_stages=(7,),
        ownership=ownership,
    )


def test_units_follow_stage_layer_and_owner() -> None:
    """L17: a dense layer has no expert units; ranges never cross what one ep rank owns (6 of 12 experts)."""
    plan = world().plan(experts_per_unit=4)
    parts = ["dense", "e0:4", "e4:6", "e6:10", "e10:12"]
    expected = ["s0.embed", "s0.l0.dense"]
    expected += [f"s0.l{layer}.{name}" for layer in (1, 2, 3) for name in parts]
    expected += [f"s1.l{layer}.{name}" for layer in (4, 5, 6) for name in parts]
    assert plan.units == (*expected, "s1.head", "s1.norm")
    assert len({unit for unit, _ in plan.elements}) == len(plan.units)


def test_replicas_share_the_bytes() -> None:
    """Four data-parallel ranks hold every dense tensor, two every expert: no rank sends much more than its part."""
    cost = plan_cost(world().plan(), world().engine)
    for stage in range(2):
        shares = [cost.by_source[rank] for rank in range(4 * stage, 4 * stage + 4)]
        assert max(shares) <= 1.15 * min(shares), shares
    assert cost.payload_bytes == cost.floor_bytes == sum(cost.by_link.values()) == sum(cost.by_target.values())
    assert cost.overhead == 1.0 and cost.largest_piece_bytes <= 4096


def test_emission_follows_the_buffers() -> None:
    plan = world().plan()
    assert [piece.seq for piece in plan.pieces] == list(range(len(plan.pieces)))
    for layout in world().trainer:
        order = [spec.name for spec in layout.buffers]
        sent = [order.index(piece.source_buffer) for piece in plan.by_source[layout.rank]]
        assert sent == sorted(sent)


@pytest.mark.parametrize("ownership", ["replica", "slice"])
def test_the_plan_names_the_buffer_that_makes_a_unit_final(ownership: str) -> None:
    """On each rank that sends part of a unit: the last of its buffers, in the order in which they become final."""
    plan = world(ownership).plan()
    orders = {layout.rank: [spec.name for spec in layout.buffers] for layout in world(ownership).trainer}
    buffers: dict[tuple[str, int], set[str]] = {}
    for piece in plan.pieces:
        buffers.setdefault((piece.unit, piece.source), set()).add(piece.source_buffer)
    last = {key: max(names, key=orders[key[1]].index) for key, names in buffers.items()}
    assert plan.closing_buffers == last
    assert any(len(names) > 1 for names in buffers.values())


def test_the_digest_covers_both_layouts_and_every_option() -> None:
    plant, family = world(), world().model.family
    base = build_plan(plant.trainer, plant.engine, family, **OPTIONS)
    again = build_plan(plant.trainer[::-1], plant.engine[::-1], family, **OPTIONS)
    assert again == base
    others = [
        build_plan(plant.trainer, plant.engine, family, **(OPTIONS | {key: value})).digest
        for key, value in {"kind": "whole", "piece_bytes": 99, "experts_per_unit": 3, "finality": "whole"}.items()
    ]
    others.append(build_plan(world("slice").trainer, plant.engine, family, **OPTIONS).digest)
    assert len({base.digest, *others}) == 6


def test_units_name_the_buffers_they_wait_for() -> None:
    """A unit can need buffers of several ranks (tied to slices), and a bucket can serve several units."""
    plan = world("slice").plan()
    needs = buffers_of_units(plan)
    assert set(needs) == set(plan.units)
    pairs = {(piece.source, piece.source_buffer) for piece in plan.pieces}
    assert {pair for unit in needs.values() for pair in unit} == pairs
    assert any(len({rank for rank, _ in unit}) > 1 for unit in needs.values())
    assert sum(len(unit) for unit in needs.values()) > len(pairs)


def test_totals_list_every_rank() -> None:
    plan = world().plan()
    for totals in (source_totals(plan), target_totals(plan)):
        assert sum(item.payload_bytes for item in totals.values()) == plan.payload_bytes
        assert sum(item.pieces for item in totals.values()) == len(plan.pieces)
    one = make_world(Model(config(**TINY)), "dp8", "tp1", trainer_stages=(1,), engine_stages=(1,)).plan()
    assert list(source_totals(one)) == list(range(8)) and source_totals(one)[7] == Totals()


def test_options_are_refused_by_name() -> None:
    for key, value in (("piece_bytes", 3), ("experts_per_unit", 0)):
        with pytest.raises(ValueError, match=f"{key} is {value}"):
            build_plan(world().trainer, world().engine, world().model.family, **(OPTIONS | {key: value}))


def test_a_quickstart_sized_plan_takes_less_than_a_second() -> None:
    shape = load_shape(config(num_hidden_layers=8, num_experts=64, hidden_size=64))
    family = family_of(shape)
    assert len(family.tensors(shape)) == 8 * (9 + 3 * 64) + 3
    trainer = trainer_layouts(family, shape, parse_trainer_mesh("pp2 ep2"))
    engine = engine_layouts(family, shape, parse_engine_mesh("pp2"))
    seconds = []
    for _ in range(3):
        start = time.process_time()
        plan = build_plan(trainer, engine, family, **OPTIONS)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.0
    # vLLM keeps embedding, norm and head on both stages; the unused copies get no bytes.
    assert plan.unused == {0: ("lm_head.weight", "model.norm.weight"), 1: ("model.embed_tokens.weight",)}
    assert plan.tensors == {0: 4 * 9 + 1, 1: 4 * 9 + 2}


@pytest.mark.parametrize("raw", [config(), qwen2_config()], ids=["qwen3", "qwen2"])
def test_synthetic_layouts_equal_the_ones_cut_by_hand(raw: dict) -> None:
    """Same names, boxes and ranks from layout strings alone; offsets differ with the buckets."""
    plant = make_world(Model(raw), "tp2 etp1 ep4 dp2", "tp4", trainer_stages=(7,), engine_stages=(7,))
    shape, family = plant.model.shape, plant.model.family
    for ours, hand in (
        (trainer_layouts(family, shape, parse_trainer_mesh("tp2 etp1 ep4 dp2")), plant.trainer),
        (engine_layouts(family, shape, parse_engine_mesh("tp4")), plant.engine),
    ):
        for one, other in zip(ours, hand, strict=True):
            found, expected = (
                {(s.tensor, s.box) for s in layout.shards if "embed" not in s.tensor and "lm_head" not in s.tensor}
                for layout in (one, other)
            )
            assert found == expected and one.unused == other.unused and one.coords == other.coords


def run_command(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(plan_command)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_the_command_prints_tables_and_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(num_hidden_layers=4)))
    layouts = ("--model", str(tmp_path), "--trainer", "pp2 ep2", "--engine", "pp2")
    code, text = run_command(*layouts, "--json")
    report = json.loads(text)
    assert code == 0 and report["bytes"] == report["bytes_floor"] == sum(report["trainer"]["bytes"].values())
    assert all(unit["buckets"] and set(unit["final_with"]) <= set(unit["buckets"]) for unit in report["units"])
    assert report["trainer"]["ranks"] == 4 and len(report["units"]) == 4 * (1 + 2) + 3
    code, text = run_command(*layouts)
    assert code == 0 and report["digest"] in text and "lm_head.weight" in text


@pytest.mark.parametrize(
    ("changes", "trainer", "words"),
    [
        ({"model_type": "gemma"}, "pp2", "model family gemma has no table; known families: "),
        ({}, "pp3", "7 layers do not divide by pp*vpp=3"),
        ({}, "ep5", "12 experts do not divide by ep=5"),
        ({}, "tp1 etp3 dp3", "20 does not divide by etp=3"),
        ({"hidden_size": None}, "pp7", "config.json field hidden_size is None"),
        ({"num_experts": 0}, "pp7", "num_experts is missing or 0, and 7 layers need experts"),
        ({"mlp_only_layers": [0], "intermediate_size": None}, "pp7", "field intermediate_size is None"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path: Path, changes: dict, trainer: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(**changes)))
    code, text = run_command("--model", str(path), "--trainer", trainer, "--engine", "tp1")
    assert code == 2 and words in text and text.count("\n") == 1
