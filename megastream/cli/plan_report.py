"""What `megastream plan` prints: tables for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megastream.cli.plan_experts import Placed
from megastream.cli.plan_staging import Staging
from megastream.families.contract import Typed
from megastream.families.refused import Refused
from megastream.layout.mesh import Mesh, engine_coords, trainer_coords
from megastream.plan import Plan
from megastream.plan.cost import PlanCost
from megastream.plan.expected import FORMULAS, Expected
from megastream.plan.hardware import Hardware
from megastream.plan.manifest import buffers_of_units

MOST_RANKS = 16
"""More of them are shown by pipeline stage (trainer) or node (engine)."""
NODE_RANKS = 8
MOST_LINKS = 8


@dataclass(frozen=True)
class Report:
    """Everything that is known about a planned pair."""

    model: str
    num_parameters: int
    num_tensors: int
    trainer: Mesh
    engine: Mesh
    experts: Placed
    plan: Plan
    cost: PlanCost
    staging: Staging
    types: tuple[Typed, ...]
    refused: tuple[Refused, ...]
    hardware: Hardware | None
    expected: Expected | None


@dataclass(frozen=True)
class Group:
    """Ranks that are shown together."""

    label: str
    ranks: tuple[int, ...]


def trainer_groups(mesh: Mesh) -> list[Group]:
    """Ranks one by one when they are few, else by pipeline stage."""
    ranks = range(mesh.world_size)
    if mesh.world_size <= MOST_RANKS:
        return [Group(f"rank {rank}", (rank,)) for rank in ranks]
    stages: dict[int, list[int]] = {}
    for rank in ranks:
        stages.setdefault(trainer_coords(mesh, rank)["pp"], []).append(rank)
    return [Group(f"stage {stage}: {each[0]} to {each[-1]}", tuple(each)) for stage, each in stages.items()]


def engine_groups(mesh: Mesh) -> list[Group]:
    """Ranks one by one when they are few, else by node of 8 ranks."""
    ranks = range(mesh.world_size)
    if mesh.world_size <= MOST_RANKS:
        stage = [f", stage {engine_coords(mesh, rank)['pp']}" if mesh.pp > 1 else "" for rank in ranks]
        return [Group(f"rank {rank}{stage[rank]}", (rank,)) for rank in ranks]
    nodes = [tuple(ranks[start : start + NODE_RANKS]) for start in range(0, mesh.world_size, NODE_RANKS)]
    return [Group(f"node {node}: {each[0]} to {each[-1]}", each) for node, each in enumerate(nodes)]


def as_dict(report: Report) -> dict[str, Any]:
    """The report for programs: plain numbers, bytes and seconds."""
    plan, cost = report.plan, report.cost
    return {
        "digest": plan.digest,
        "model": {"name": report.model, "parameters": report.num_parameters, "tensors": report.num_tensors},
        "trainer": {"layout": str(report.trainer), "ranks": plan.num_trainer_ranks, "bytes": cost.by_source},
        "engine": {
            "layout": str(report.engine),
            "ranks": plan.num_engine_ranks,
            "experts": report.experts.as_dict(),
            "bytes": cost.by_target,
            "staging_bytes": dict(enumerate(report.staging.set_bytes)),
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
        "busiest": {
            "source": {"rank": cost.busiest_source, "bytes": cost.by_source[cost.busiest_source]},
            "target": {"rank": cost.busiest_target, "bytes": cost.by_target[cost.busiest_target]},
        },
        "peak_staging_bytes": report.staging.peak_bytes,
        "staging": report.staging.as_dict(),
        "types": [asdict(each) for each in report.types],
        "refused": [asdict(each) for each in report.refused],
        "expected": _expected_dict(report),
    }


def _expected_dict(report: Report) -> dict[str, Any] | None:
    if report.expected is None or report.hardware is None:
        return None
    expected = report.expected
    return {
        "hardware": asdict(report.hardware),
        "model": FORMULAS,
        "wire_s": expected.wire_s,
        "step_s": expected.step_s,
        "backward_s": expected.backward_s,
        "commit_s": expected.commit_s,
        "updates": [
            {"finality": policy, "gate": gate, "live_s": live, "stall_s": expected.stall_s[policy, gate]}
            for (policy, gate), live in expected.live_s.items()
        ],
    }


def print_report(report: Report, console: Console) -> None:
    """The report for people."""
    plan, cost = report.plan, report.cost
    console.print(
        f"[bold]{report.model}[/], {report.num_parameters:,} parameters in {report.num_tensors:,} tensors\n"
        f"trainer [bold]{report.trainer}[/], {plan.num_trainer_ranks} ranks\n"
        f"engine  [bold]{report.engine}[/], {plan.num_engine_ranks} ranks{report.experts}",
        highlight=False,
    )
    console.print(_summary(report))
    console.print(_side("trainer", "sends", trainer_groups(report.trainer), cost.by_source, cost.pieces_by_source))
    console.print(_side("engine", "receives", engine_groups(report.engine), cost.by_target, cost.pieces_by_target))
    console.print(_links(cost))
    console.print(_types(report.types))
    if report.expected is not None and report.hardware is not None:
        console.print(_expected(report.expected, report.hardware))
        _print_model(report.hardware, console)
    for each in report.refused:
        console.print(f"[yellow]refused[/] {each.tensors}: {each.why}", highlight=False)
    _print_pulled(report.staging, console)
    for names, ranks in _unused(plan.unused).items():
        console.print(f"never computed with on engine ranks {ranks}: {', '.join(names)}", highlight=False)
    console.print(f"digest {plan.digest}", highlight=False)


def _print_pulled(staging: Staging, console: Console) -> None:
    """What a commit pulls, what that risks, and what would end it."""
    if not (found := staging.shortages):
        return
    console.print(
        "[yellow]pulled[/] inside each commit: a trainer that is lost meanwhile poisons the engine, until the next "
        "complete version; steps wait for commits; gate version only",
        highlight=False,
    )
    more = f"; likewise {len(found) - 1} more ranks" if len(found) > 1 else ""
    console.print(f"[yellow]pulled[/] {found[0]}{more}", highlight=False)


def _table(title: str, *columns: str) -> Table:
    """Text in the first column and in one without a name, numbers in the others."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index and column else "left", header_style="dim", no_wrap=True)
    return table


def _summary(report: Report) -> Table:
    plan, cost = report.plan, report.cost
    table = _table("\none version", "", "number")
    table.show_header = False
    source, target = cost.busiest_source, cost.busiest_target
    for name, value in (
        ("units", f"{len(plan.units):,}"),
        ("messages", f"{cost.pieces:,}"),
        ("copies", f"{cost.copies:,}"),
        ("bytes", size(cost.payload_bytes)),
        ("against the floor", f"{cost.overhead:.4f}"),
        ("largest message", size(cost.largest_piece_bytes)),
        ("busiest sender", f"rank {source}, {size(cost.by_source[source])}"),
        ("busiest receiver", f"rank {target}, {size(cost.by_target[target])}"),
        ("sender balance (1 is even)", f"{cost.balance:.3f}"),
        *staging_rows(report.staging),
    ):
        table.add_row(name, value)
    return table


def staging_rows(staging: Staging) -> list[tuple[str, str]]:
    """Name and number of what staging takes."""
    sets = f"{staging.num_sets} versions"
    if not staging.placements:
        return [("peak staging of a rank", f"{sets}, {size(staging.peak_bytes)}")]
    on_device, on_host = staging.fullest
    pulled = max(staging.pulled_bytes.values())
    return [
        ("most staging on a rank's device", f"{sets}, {size(on_device)}"),
        ("most staging of a rank in host memory", f"{sets}, {size(on_host)}"),
        *([("most that a rank pulls inside a commit", size(pulled))] if pulled else []),
    ]


def _side(title: str, verb: str, groups: Sequence[Group], sizes: Mapping[int, int], pieces: Mapping[int, int]) -> Table:
    grouped = any(len(group.ranks) > 1 for group in groups)
    table = _table(f"\n{title}", "", verb, *(("least rank", "most rank") if grouped else ()), "messages", "")
    largest = max(sum(sizes[rank] for rank in group.ranks) for group in groups)
    for group in groups:
        each = [sizes[rank] for rank in group.ranks]
        spread = (size(min(each)), size(max(each))) if grouped else ()
        bar = "█" * round(12 * sum(each) / max(largest, 1))
        count = f"{sum(pieces[rank] for rank in group.ranks):,}"
        table.add_row(group.label, size(sum(each)), *spread, count, f"[cyan]{bar}[/]")
    return table


def _links(cost: PlanCost) -> Table:
    shown = sorted(cost.by_link.items(), key=lambda item: (-item[1], item[0]))[:MOST_LINKS]
    more = "" if len(shown) == len(cost.by_link) else f", the {len(shown)} with most bytes"
    table = _table(f"\n{len(cost.by_link):,} links{more}", "trainer to engine rank", "bytes")
    for (source, target), num_bytes in shown:
        table.add_row(f"{source} to {target}", size(num_bytes))
    return table


def _types(types: Sequence[Typed]) -> Table:
    """Tensor by tensor; one line for all of them when they are alike."""
    alike = len({(each.trainer, each.engine) for each in types}) == 1
    table = _table("\ntypes", "", "trainer", "engine")
    for each in types[:1] if alike else types:
        table.add_row("all tensors" if alike else each.tensors, each.trainer, each.engine)
    return table


def _expected(expected: Expected, hardware: Hardware) -> Table:
    table = _table(f"\nexpected on {hardware.name}", "finality, gate", "all sent", "live", "engine stands still")
    for (policy, gate), live in expected.live_s.items():
        sent = seconds(expected.sent_s[policy]) if gate == "version" else ""
        table.add_row(f"{policy}, {gate}", sent, seconds(live), seconds(expected.stall_s[policy, gate]))
    return table


def _print_model(hardware: Hardware, console: Console) -> None:
    """How the seconds come about, and where the numbers are from."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), style="dim")
    table.title, table.title_justify, table.title_style = "from the end of the last backward, where", "left", "dim"
    for name, formula in FORMULAS.items():
        table.add_row(name, formula)
    for name, number in asdict(hardware).items():
        if isinstance(number, dict):
            table.add_row(name, f"{number['value']:g}: {number['source']}")
    console.print(table)


def _unused(unused: Mapping[int, tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Ranks by what they have in common."""
    ranks: dict[tuple[str, ...], list[str]] = {}
    for rank, names in unused.items():
        if names:
            ranks.setdefault(names, []).append(str(rank))
    return {names: ", ".join(each) for names, each in ranks.items()}


def size(num_bytes: float) -> str:
    """Bytes with a unit."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def seconds(value: float) -> str:
    """Seconds to three digits."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
