"""Expected seconds of `megastream plan`: the formulas by hand, what they are given, and where numbers are from."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import product

import pytest

from megastream.layout.mesh import parse_engine_mesh, parse_trainer_mesh
from megastream.layout.synthetic import engine_layouts, trainer_layouts
from megastream.plan import build_plan
from megastream.plan.cost import PlanCost, plan_cost
from megastream.plan.expected import FORMULAS, Load, Parts, expect, load_of, parts_of
from megastream.plan.hardware import PROFILES, Hardware, Sourced
from megastream.plan.pieces import PieceTable
from tests.helpers.layout_reference import Model, config
from tests.unit.test_plan_command import as_json, run


def test_every_number_of_the_hardware_has_a_source() -> None:
    for hardware in PROFILES.values():
        numbers = [getattr(hardware, field.name) for field in fields(Hardware) if field.name != "name"]
        assert all(isinstance(each, Sourced) and each.value > 0 and len(each.source) > 5 for each in numbers)
    told = run("--model", "tiny-qwen3-moe", "--trainer", "", "--engine", "", "--hardware", "abacus", code=2)
    assert "hardware 'abacus' has no profile; known: h100-ib, h200-nvlink" in told


def machine(**changes: float) -> Hardware:
    numbers = {field.name: 1.0 for field in fields(Hardware) if field.name != "name"} | changes
    return Hardware("by hand", **{name: Sourced(value, "by hand") for name, value in numbers.items()})


def test_expected_seconds_are_the_formulas() -> None:
    """Worked by hand: lanes of 10 bytes per second, memory of 100, two buckets."""
    cost = PlanCost(4, 4, 400, 400, {}, {0: 300, 1: 100}, {0: 200, 1: 200}, {0: 5, 1: 1}, {0: 3, 1: 3}, 100)
    load = Load(20, 40, 25.0, 2, 1000, 500.0, 7)
    hardware = machine(
        lane_bytes_per_s=10, memory_bytes_per_s=100, piece_s=2, peak_flops_per_s=50, pause_s=3, idle_share=0.25
    )
    parts = Parts(((150, 40), (50, 160)), (120, 100))
    found = expect(cost, load, parts, hardware)
    assert found.wire_s == 300 / 10 + 5 * 2  # rank 0 sends 300 bytes in 5 messages
    assert found.step_s == 30 * 20 / 100 + 40 / 10
    assert found.backward_s == 4 * 25 * 1 / 50
    assert found.commit_s == 2 * 200 / 100
    assert found.sent_s == {"whole": 50, "pipelined": 45, "speculative": 43, "early": 43}
    assert found.live_s["pipelined", "version"] == 45 + 4 and found.stall_s["pipelined", "version"] == 4
    assert found.stall_s["whole", "pause"] == 1000 / 10 + 7 * 1 + 3
    assert found.live_s["whole", "pause"] == 10 + 110
    # Rank 0 takes 3 of its 4 s for stage 0, rank 1 3.2 of its 4 s for stage 1.
    assert found.live_s["pipelined", "stage"] == pytest.approx(45 + 3.2)
    assert found.stall_s["early", "stage"] == pytest.approx(3 + 3.2)
    # A quarter of the experts ahead: 30 and 25 of 200 bytes.
    assert found.live_s["whole", "idle_experts"] == pytest.approx(50 + 4 * 175 / 200)
    assert found.stall_s["whole", "idle_experts"] == pytest.approx(4 * 175 / 200 + 4 * 30 / 200)
    assert {gate for _, gate in found.live_s} == {"version", "stage", "idle_experts", "pause"}
    assert {gate for _, gate in expect(cost, load, parts, hardware, {}, {1: 5}).live_s} == {"version", "pause"}
    dense = expect(cost, load, Parts(parts.stages, (0, 0)), hardware)
    assert {gate for _, gate in dense.live_s} == {"version", "stage", "pause"}
    gates = {"version", "stage", "idle_experts", "pause"}
    assert {"wire", "step", "backward", "commit", *gates, *found.sent_s} == set(FORMULAS)


def test_the_load_counts_what_ranks_hold() -> None:
    """pp1 ep2 dp2: both ranks hold all dense weights and half of the experts; dense ones are stepped by halves."""
    model = Model(config())
    trainer = trainer_layouts(model.family, model.shape, parse_trainer_mesh("ep2 dp2"))
    engine = engine_layouts(model.family, model.shape, parse_engine_mesh("tp2 ep2"))
    options = dict(kind="stream", piece_bytes=1 << 20, experts_per_unit=8, finality="pipelined")
    plan = build_plan(trainer, engine, model.family, **options)
    assert isinstance(plan.pieces, PieceTable)
    names = [spec.name for spec in plan.pieces.tables.tensors]
    load = load_of(plan.pieces.tables, [".experts." in name for name in names], active=0.5)
    expert = sum(array.size for name, array in model.tensors.items() if ".experts." in name)
    dense = sum(array.size for array in model.tensors.values()) - expert
    assert load.step_parameters == dense // 2 + expert // 2
    assert load.gather_bytes == 2 * dense // 2
    assert load.active_parameters == dense + expert / 2
    # The engine's loader reads full dense tensors and this rank's experts.
    assert load.full_receive_bytes == 2 * (dense + expert // 2) and load.tensors == len(names) - 3 * 7 * 6
    assert load.full_send_bytes == load.full_receive_bytes
    assert plan_cost(plan, engine).busiest_source in (0, 1)


def test_the_parts_are_those_of_the_units() -> None:
    """Two trainer stages to one engine rank: by hand, from the full tensors."""
    model = Model(config())
    trainer = trainer_layouts(model.family, model.shape, parse_trainer_mesh("pp2(3,4)"))
    engine = engine_layouts(model.family, model.shape, parse_engine_mesh("tp1"))
    options = dict(kind="stream", piece_bytes=1 << 20, experts_per_unit=8, finality="pipelined")
    parts = parts_of(build_plan(trainer, engine, model.family, **options).pieces, 1)
    sizes = {name: 4 * array.size for name, array in model.tensors.items()}
    first = sum(num for name, num in sizes.items() if "embed" in name or re.search(r"layers\.[012]\.", name))
    assert parts.stages == ((first,), (sum(sizes.values()) - first,))
    assert parts.experts == (sum(num for name, num in sizes.items() if ".experts." in name),)


def test_expected_seconds_are_printed_with_their_sources() -> None:
    layouts = ("--model", "tiny-qwen3-moe", "--trainer", "pp2 ep2", "--engine", "pp2", "--hardware", "h100-ib")
    report = as_json(*layouts)["expected"]
    assert {(each["finality"], each["gate"]) for each in report["updates"]} == {
        *product(("whole", "pipelined", "speculative", "early"), ("version", "stage", "idle_experts")),
        ("whole", "pause"),
    }
    assert report["hardware"]["lane_bytes_per_s"]["source"].startswith("DeepEP")
    text = run(*layouts)
    assert "expected on h100-ib" in text and "assumed" in text and "max(step + wire / buckets" in text
