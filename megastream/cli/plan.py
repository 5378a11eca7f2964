"""`megastream plan`: what a pair of layouts costs, from a config.json alone. Needs neither torch nor an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megastream.cli.plan_experts import place_experts
from megastream.cli.plan_html import html_page
from megastream.cli.plan_limits import check_plan
from megastream.cli.plan_report import Report, as_dict, print_report
from megastream.cli.plan_staging import STAGING_SETS, staging_of
from megastream.families import ModelShape, family_of, load_shape
from megastream.families.contract import contract
from megastream.families.refused import refused
from megastream.families.shipped import num_parameters, shape_of_model
from megastream.layout.mesh import Mesh, parse_engine_mesh, parse_trainer_mesh
from megastream.layout.synthetic import engine_layouts, trainer_layouts
from megastream.plan import build_plan
from megastream.plan.cost import plan_cost
from megastream.plan.expected import expect, load_of, parts_of
from megastream.plan.hardware import PROFILES, profile
from megastream.plan.pieces import PieceTable
from megastream.plan.tiers import StagingBudget

_MIB = 1 << 20


def plan_command(
    model: Annotated[
        str, typer.Option(help="A config.json, the folder that holds it, or the name of a shipped model.")
    ],
    trainer: Annotated[
        str, typer.Option(help='Megatron layout, e.g. "pp2 ep2", "tp=2,etp=1,pp=2(25,23),ep=8", or "pp2(Ett|t|tt|tL)".')
    ],
    engine: Annotated[
        str,
        typer.Option(help='vLLM layout, e.g. "pp2" or "tp8 dp2 ep16", "tp4 ep4 round_robin"; ep is tp*dp or off.'),
    ],
    expert_map: Annotated[
        Path | None,
        typer.Option(
            help="JSON file: the expert in each slot of the engine (EPLB), a list for every layer or for all."
        ),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help=f"Also expected seconds, on one of: {', '.join(sorted(PROFILES))}.")
    ] = None,
    piece_bytes: Annotated[int, typer.Option(min=1, help="Largest payload of one message, in bytes.")] = 16 * _MIB,
    experts_per_unit: Annotated[int, typer.Option(min=1, help="Experts that are tracked together.")] = 8,
    staging_sets: Annotated[
        int, typer.Option(min=1, max=1024, help="Versions in staging at once, as in the engine's settings.")
    ] = STAGING_SETS,
    staging_device_bytes: Annotated[
        int | None, typer.Option(help="Most bytes of an engine rank's device that its staging may take.")
    ] = None,
    staging_host_bytes: Annotated[
        int | None, typer.Option(help="Likewise of host memory; what fits in neither is pulled.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the map as one HTML file.")] = None,
) -> None:
    """Plan a reshard from layout strings: units, bytes per rank and link, balance, floor, staging, expected seconds."""
    try:
        meshes = parse_trainer_mesh(trainer), parse_engine_mesh(engine)
        budget = StagingBudget(staging_device_bytes, staging_host_bytes)
        report = _report(model, *meshes, expert_map, hardware, piece_bytes, experts_per_unit, budget, staging_sets)
        if html is not None:
            html.write_text(html_page(report), encoding="utf-8")
    except (ValueError, OSError) as error:
        typer.echo(f"megastream plan: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(as_dict(report), indent=2))
    else:
        print_report(report, Console())


def _report(
    model: str,
    trainer: Mesh,
    engine: Mesh,
    expert_map: Path | None,
    hardware: str | None,
    piece_bytes: int,
    experts_per_unit: int,
    budget: StagingBudget,
    staging_sets: int,
) -> Report:
    machine = None if hardware is None else profile(hardware)
    shape = _shape(model)
    family = family_of(shape)
    slots, experts = place_experts(expert_map, family, shape, engine)
    check_plan(shape, trainer, engine, experts.num_slots, piece_bytes, experts_per_unit)
    targets = engine_layouts(family, shape, engine, slots)
    plan = build_plan(
        trainer_layouts(family, shape, trainer),
        targets,
        family,
        kind="stream",
        piece_bytes=piece_bytes,
        experts_per_unit=experts_per_unit,
        finality="pipelined",
    )
    cost = plan_cost(plan, targets)
    assert isinstance(plan.pieces, PieceTable)
    both, staging = plan.pieces.tables, staging_of(plan.pieces, budget, staging_sets)
    is_expert = [family.place(spec.name).kind == "expert" for spec in both.tensors]
    active = shape.top_k / shape.num_experts if shape.num_experts else 1.0
    asked = load_of(both, is_expert, active), parts_of(plan.pieces, plan.num_engine_ranks)
    return Report(
        model=model if not Path(model).exists() else Path(model).name,
        num_parameters=num_parameters(shape),
        num_tensors=len(both.tensors),
        trainer=trainer,
        engine=engine,
        experts=experts,
        plan=plan,
        cost=cost,
        staging=staging,
        types=contract(family, shape),
        refused=refused(shape),
        hardware=machine,
        expected=None
        if machine is None
        else expect(cost, *asked, machine, staging.host_set_bytes, staging.pulled_bytes),
    )


def _shape(model: str) -> ModelShape:
    return load_shape(Path(model)) if Path(model).exists() else shape_of_model(model)
