"""The map of a plan as one self-contained HTML file: trainer ranks left, engine ranks right, bands sized by bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from megastream.cli.plan_report import Group, Report, engine_groups, seconds, size, staging_rows, trainer_groups

WIDTH, LEFT, RIGHT, NODE = 1120, 250, 870, 14
"""Pixels of the drawing: its width, the inner edges of both columns of nodes, and a node's width."""
PIXELS = 560
"""Height of all bytes together, without gaps."""
GAP = 12


@dataclass(frozen=True)
class _Node:
    label: str
    num_bytes: int
    top: float
    height: float


def html_page(report: Report) -> str:
    """The page. Works from a file, without network, in light and dark."""
    sources, targets = trainer_groups(report.trainer), engine_groups(report.engine)
    bands = _bands(report.cost.by_link, sources, targets)
    title = f"{report.model}: {report.trainer} to {report.engine}"
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(report))
    return _PAGE.format(
        title=escape(title),
        heading=escape(report.model),
        trainer=escape(f"{report.trainer}, {report.plan.num_trainer_ranks} ranks"),
        engine=escape(f"{report.engine}, {report.plan.num_engine_ranks} ranks{report.experts}"),
        facts=facts,
        drawing=_drawing(bands, sources, targets),
        matrix=_matrix(bands, sources, targets),
        expected=_expected(report),
        ranks=_ranks(report),
        refused=_refused(report),
        digest=report.plan.digest,
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    cost = report.cost
    return [
        ("one version", size(cost.payload_bytes)),
        ("against the floor", f"{cost.overhead:.4f}"),
        ("messages", f"{cost.pieces:,}"),
        ("units", f"{len(report.plan.units):,}"),
        ("busiest sender", f"rank {cost.busiest_source}, {size(cost.by_source[cost.busiest_source])}"),
        ("busiest receiver", f"rank {cost.busiest_target}, {size(cost.by_target[cost.busiest_target])}"),
        ("sender balance", f"{cost.balance:.3f}"),
        *staging_rows(report.staging),
    ]


def _bands(
    links: Mapping[tuple[int, int], int], sources: Sequence[Group], targets: Sequence[Group]
) -> dict[tuple[int, int], int]:
    """Bytes by (source group, target group)."""
    source_of = {rank: number for number, group in enumerate(sources) for rank in group.ranks}
    target_of = {rank: number for number, group in enumerate(targets) for rank in group.ranks}
    bands: dict[tuple[int, int], int] = {}
    for (source, target), num_bytes in links.items():
        key = source_of[source], target_of[target]
        bands[key] = bands.get(key, 0) + num_bytes
    return dict(sorted(bands.items()))


def _nodes(bands: Mapping[tuple[int, int], int], groups: Sequence[Group], side: int, height: float) -> list[_Node]:
    """One column of nodes, as high as their bytes, spread over the height of the drawing."""
    totals = [sum(num for key, num in bands.items() if key[side] == number) for number in range(len(groups))]
    scale = PIXELS / max(sum(totals), 1)
    top = (height - PIXELS - GAP * (len(groups) - 1)) / 2
    nodes = []
    for group, total in zip(groups, totals, strict=True):
        nodes.append(_Node(group.label, total, top, total * scale))
        top += total * scale + GAP
    return nodes


def _drawing(bands: Mapping[tuple[int, int], int], sources: Sequence[Group], targets: Sequence[Group]) -> str:
    height = PIXELS + GAP * (max(len(sources), len(targets)) - 1) + 20
    left, right = _nodes(bands, sources, 0, height), _nodes(bands, targets, 1, height)
    scale = PIXELS / max(sum(bands.values()), 1)
    from_y, to_y = [node.top for node in left], [node.top for node in right]
    parts = []
    for (source, target), num_bytes in bands.items():
        thick = num_bytes * scale
        note = f"{left[source].label} to {right[target].label}: {size(num_bytes)}"
        parts.append(
            f'<path class="band s{source} t{target} c{source % 8}" d="{_ribbon(from_y[source], to_y[target], thick)}">'
            f"<title>{escape(note)}</title></path>"
        )
        from_y[source] += thick
        to_y[target] += thick
    for number, node in enumerate(left):
        parts.append(_node_svg(node, LEFT - NODE, f"s{number} c{number % 8}", LEFT - NODE - 8, "end"))
    for number, node in enumerate(right):
        parts.append(_node_svg(node, RIGHT, f"t{number} engine", RIGHT + NODE + 8, "start"))
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="bytes from trainer ranks to engine ranks">'
        f"{''.join(parts)}</svg>"
    )


def _ribbon(y0: float, y1: float, thick: float) -> str:
    """A band of even thickness from the left column to the right one; never thinner than a hair."""
    thick, mid = max(thick, 0.6), (LEFT + RIGHT) / 2
    return (
        f"M{LEFT},{y0:.1f} C{mid},{y0:.1f} {mid},{y1:.1f} {RIGHT},{y1:.1f} V{y1 + thick:.1f} "
        f"C{mid},{y1 + thick:.1f} {mid},{y0 + thick:.1f} {LEFT},{y0 + thick:.1f} Z"
    )


def _node_svg(node: _Node, x: int, classes: str, text_x: int, anchor: str) -> str:
    middle = node.top + node.height / 2
    return (
        f'<g class="node {classes}" tabindex="0"><rect x="{x}" y="{node.top:.1f}" width="{NODE}" '
        f'height="{max(node.height, 2):.1f}" rx="2"/><text x="{text_x}" y="{middle:.1f}" text-anchor="{anchor}">'
        f'{escape(node.label)} <tspan class="quiet">{size(node.num_bytes)}</tspan></text></g>'
    )


def _matrix(bands: Mapping[tuple[int, int], int], sources: Sequence[Group], targets: Sequence[Group]) -> str:
    head = "".join(f"<th>{escape(group.label)}</th>" for group in targets)
    rows = "".join(
        f"<tr><th>{escape(group.label)}</th>"
        + "".join(
            f"<td>{size(bands[number, column]) if (number, column) in bands else '·'}</td>"
            for column in range(len(targets))
        )
        + "</tr>"
        for number, group in enumerate(sources)
    )
    return f"<table><thead><tr><th>from \\ to</th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _ranks(report: Report) -> str:
    """Every rank of both sides, whatever the drawing groups."""
    cost = report.cost
    tables = []
    for title, verb, sizes, pieces in (
        ("Trainer ranks", "sends", cost.by_source, cost.pieces_by_source),
        ("Engine ranks", "receives", cost.by_target, cost.pieces_by_target),
    ):
        rows = "".join(
            f"<tr><th>{rank}</th><td>{size(num_bytes)}</td><td>{pieces[rank]:,}</td></tr>"
            for rank, num_bytes in sizes.items()
        )
        head = f"<tr><th>rank</th><th>{verb}</th><th>messages</th></tr>"
        tables.append(f"<div><h2>{title}</h2><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>")
    return "".join(tables)


def _expected(report: Report) -> str:
    if report.expected is None or report.hardware is None:
        return ""
    expected = report.expected
    rows = "".join(
        f"<tr><th>{policy}, {gate}</th><td>{seconds(live)}</td><td>{seconds(expected.stall_s[policy, gate])}</td></tr>"
        for (policy, gate), live in expected.live_s.items()
    )
    return (
        f"<h2>Expected on {escape(report.hardware.name)}</h2><p class='quiet'>From the end of the last backward; a "
        "model, not a measurement: <code>megastream plan</code> prints its formulas and sources.</p><table><thead><tr>"
        f"<th>finality, gate</th><th>live</th><th>engine stands still</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _refused(report: Report) -> str:
    if not report.refused:
        return ""
    rows = "".join(f"<li><code>{escape(each.tensors)}</code>: {escape(each.why)}</li>" for each in report.refused)
    return f"<h2>Refused</h2><ul>{rows}</ul>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --ink: #1b1f24; --quiet: #667080; --line: #d9dee5; --paper: #ffffff;
  --engine: #4b5563; --c0: #2f6fde; --c1: #d9772b; --c2: #2a9d72; --c3: #b5459b; --c4: #8a6fdf; --c5: #b08a1e;
  --c6: #1f9bb5; --c7: #c94a4a; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e9ee; --quiet: #97a1b0; --line: #333b46; --paper: #14181d;
  --engine: #aab4c2; --c0: #6ea2ff; --c1: #f0a060; --c2: #5cc89c; --c3: #dd83c9; --c4: #b3a0f5; --c5: #d9b650;
  --c6: #5cc5da; --c7: #ec8080; }} }}
body {{ margin: 0 auto; padding: 24px 28px 60px; max-width: 1180px; background: var(--paper); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 22px; margin: 0; }} h2 {{ font-size: 16px; margin: 32px 0 8px; }}
.quiet {{ color: var(--quiet); fill: var(--quiet); }}
.sides {{ display: flex; justify-content: space-between; gap: 24px; margin: 18px 0 4px; font-weight: 600; }}
dl {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 10px 24px; margin: 18px 0 0; }}
dt {{ color: var(--quiet); font-size: 12px; }} dd {{ margin: 0; font-size: 16px; font-variant-numeric: tabular-nums; }}
svg {{ width: 100%; height: auto; display: block; }}
svg text {{ font-size: 12px; fill: var(--ink); dominant-baseline: middle; }} svg text .quiet {{ fill: var(--quiet); }}
.band {{ fill-opacity: .38; transition: fill-opacity .12s; }} .band:hover {{ fill-opacity: .8; }}
svg.picked .band {{ fill-opacity: .06; }} svg.picked .band.on {{ fill-opacity: .75; }}
.node {{ cursor: default; outline: none; }} .node:focus rect {{ stroke: var(--ink); stroke-width: 2; }}
.engine rect {{ fill: var(--engine); }}
.c0 {{ fill: var(--c0); }} .c1 {{ fill: var(--c1); }} .c2 {{ fill: var(--c2); }} .c3 {{ fill: var(--c3); }}
.c4 {{ fill: var(--c4); }} .c5 {{ fill: var(--c5); }} .c6 {{ fill: var(--c6); }} .c7 {{ fill: var(--c7); }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }}
th:first-child {{ text-align: left; }} tbody th {{ font-weight: 400; }}
thead th {{ color: var(--quiet); font-weight: 400; }}
.ranks {{ display: flex; gap: 60px; flex-wrap: wrap; }} code {{ font-size: 13px; }}
</style></head><body>
<h1>{heading}</h1>
<dl>{facts}</dl>
<div class="sides"><span>Trainer: {trainer}</span><span>Engine: {engine}</span></div>
{drawing}
<h2>Bytes from each to each</h2><div class="scroll">{matrix}</div>
{expected}{refused}
<div class="ranks">{ranks}</div>
<p class="quiet">digest {digest}</p>
<script>
const svg = document.querySelector("svg");
const pick = (node) => {{
  const key = [...node.classList].find((name) => /^[st][0-9]+$/.test(name));
  svg.classList.add("picked");
  svg.querySelectorAll(".band").forEach((band) => band.classList.toggle("on", band.classList.contains(key)));
}};
svg.querySelectorAll(".node").forEach((node) => {{
  for (const name of ["mouseenter", "focus"]) node.addEventListener(name, () => pick(node));
  for (const name of ["mouseleave", "blur"]) node.addEventListener(name, () => svg.classList.remove("picked"));
}});
</script></body></html>
"""
