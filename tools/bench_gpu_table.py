"""What tools/bench_gpu.py prints: a line for each stretch, a table at the end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

CONSOLE = Console(highlight=False, width=150)
STOCK = "stock NCCL packed, pause keep"


def line(row: Any) -> str:
    return (
        f"{row.what}: {row.tokens_per_s:.0f} tok/s, step {row.step_ms:.2f}, p99 {row.p99_ms:.2f}, "
        f"gap {row.gap_ms:.1f}, longest {row.longest_ms:.1f} ms {row.facts}"
    )


def summary(rows: Sequence[Any], facts: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    """The figures of the table. `rows`: Noticed; `facts`: what was measured besides; `answers` of the fixed prompts."""
    found: dict[str, Any] = {}
    for what in ("megastream", STOCK):
        none = [row for row in rows if row.what == f"{what}: none"]
        one = [row for row in rows if row.what == f"{what}: one"]
        if not one:
            continue
        step_ms = statistics.median(row.step_ms for row in none)
        found[what] = {
            "step_ms": step_ms,
            "gap_without_ms": statistics.median(row.gap_ms for row in none) - step_ms,
            "gap_ms": statistics.median(row.gap_ms for row in one) - step_ms,
            "live_s": statistics.median(row.facts["live_s"] for row in one),
        }
        if sent := [row.facts["bytes"] / row.facts["sent_s"] / 1e9 for row in one if "sent_s" in row.facts]:
            found[what]["lane_gb_s"] = statistics.median(sent)
            found[what]["bytes_over_floor"] = one[-1].facts["bytes"] / facts["floor"]
    if commits := [device_s for _, _, device_s in facts.get("commits", []) if device_s]:
        found["commit_ms"] = 1e3 * statistics.median(commits)
        found["device_copy_ms"] = 1e3 * facts["bytes"] / facts["raw"]["device_copy"]
    long = {row.what: row for row in rows if row.what.endswith("long")}
    if len(long) == 2:
        without, often = long.values()
        found["tokens_share"] = often.tokens_per_s / without.tokens_per_s
        found["p99_share"] = often.p99_ms / without.p99_ms
    if len(answers) == 2:
        found["tokens_equal_stock"] = answers["megastream"] == answers["stock"]
    return found


def print_summary(size: str, figures: dict[str, Any], raw: dict[str, float]) -> None:
    table = Table("figure", "value", title=f"{size}; raw GB/s: { {k: round(v / 1e9) for k, v in raw.items()} }")
    for what, value in figures.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for name, each in parts:
            table.add_row(f"{what} {name}".strip(), f"{each:.4g}" if isinstance(each, float) else str(each))
    CONSOLE.print(table)
