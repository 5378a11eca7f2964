"""`megastream plan`: what a pair of layouts costs, from a config.json alone. Needs neither torch nor an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megastream.cli.plan_limits import check_plan
from megastream.families import ModelShape, family_of, load_shape
from megastream.layout.mesh import Mesh, parse_engine_mesh, parse_trainer_mesh
from megastream.layout.synthetic import engine_layouts, trainer_layouts
from megastream.plan import Plan, build_plan
from megastream.plan.cost import PlanCost, plan_cost
from megastream.plan.manifest import Totals, buffers_of_units, source_totals, target_totals

_MIB = 1 << 20


def plan_command(
    model: Annotated[Path, typer.Option(help="config.json of the model, or the folder that holds it.")],
    trainer: Annotated[str, typer.Option(help='Megatron layout, e.g. "pp2 ep2" or "tp2 etp1 pp2(25,23) ep8".')],
    engine: Annotated[str, typer.Option(help='vLLM layout, e.g. "pp2" or "tp2 ep2" (expert parallel).')],
    piece_bytes: Annotated[int, typer.Option(min=1, help="Largest payload of one message, in bytes.")] = 16 * _MIB,
    experts_per_unit: Annotated[int, typer.Option(min=1, help="Experts that are tracked together.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Plan a reshard from layout strings and print its units, bytes per rank and link, balance and floor."""
    try:
        shape = load_shape(model)
        meshes = parse_trainer_mesh(trainer), parse_engine_mesh(engine)
        plan, cost = _plan(shape, *meshes, piece_bytes, experts_per_unit)
    except (ValueError, OSError) as error:
        typer.echo(f"megastream plan: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(_as_dict(plan, cost, *meshes), indent=2))
    else:
        _print(plan, cost, *meshes)


def _plan(shape: ModelShape, trainer: Mesh, engine: Mesh, piece_bytes: int, experts: int) -> tuple[Plan, PlanCost]:
    check_plan(shape, trainer, engine, piece_bytes, experts)
    family = family_of(shape)
    targets = engine_layouts(family, shape, engine)
    plan = build_plan(
        trainer_layouts(family, shape, trainer),
        targets,
        family,
        kind="stream",
        piece_bytes=piece_bytes,
        experts_per_unit=experts,
        finality="pipelined",
    )
    return plan, plan_cost(plan, targets)


def _as_dict(plan: Plan, cost: PlanCost, trainer: Mesh, engine: Mesh) -> dict[str, Any]:
    return {
        "digest": plan.digest,
        "trainer": {"layout": str(trainer), "ranks": plan.num_trainer_ranks, "bytes": cost.by_source},
        "engine": {
            "layout": str(engine),
            "ranks": plan.num_engine_ranks,
            "bytes": cost.by_target,
            "tensors": plan.tensors,
            "unused": plan.unused,
        },
        "links": [{"source": s, "target": t, "bytes": num} for (s, t), num in cost.by_link.items()],
        "units": [
            {
                "unit": unit,
                "buckets": [f"{rank}:{name}" for rank, name in pairs],
                "final_with": [f"{rank}:{plan.closing_buffers[unit, rank]}" for rank in sorted({r for r, _ in pairs})],
            }
            for unit, pairs in buffers_of_units(plan).items()
        ],
        "pieces": cost.pieces,
        "copies": cost.copies,
        "bytes": cost.payload_bytes,
        "bytes_floor": cost.floor_bytes,
        "largest_piece_bytes": cost.largest_piece_bytes,
        "balance": round(cost.balance, 4),
    }


def _print(plan: Plan, cost: PlanCost, trainer: Mesh, engine: Mesh) -> None:
    console = Console()
    console.print(f"[bold]{trainer}[/] ({plan.num_trainer_ranks} trainer ranks) to [bold]{engine}[/] (vLLM)")
    console.print(
        f"{len(plan.units)} units, {cost.pieces} pieces, {cost.copies} copies, {_size(cost.payload_bytes)} per version "
        f"({cost.overhead:.4f} x floor), largest piece {_size(cost.largest_piece_bytes)}, balance {cost.balance:.3f}"
    )
    console.print(_rank_table("trainer rank", "sends", source_totals(plan)))
    console.print(_rank_table("engine rank", "receives", target_totals(plan)))
    links = Table("link", "bytes", title="links")
    for (source, target), num_bytes in cost.by_link.items():
        links.add_row(f"{source} to {target}", _size(num_bytes))
    console.print(links)
    for rank, names in plan.unused.items():
        if names:
            console.print(f"engine rank {rank} never computes with: {', '.join(names)}")
    console.print(f"digest {plan.digest}")


def _rank_table(head: str, verb: str, totals: dict[int, Totals]) -> Table:
    table = Table(head, "pieces", verb)
    for rank, total in totals.items():
        table.add_row(str(rank), str(total.pieces), _size(total.payload_bytes))
    return table


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
