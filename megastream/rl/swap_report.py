"""The results of the swap experiment: JSON, CSV, and one self-contained HTML page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from megastream.rl.swap_config import Case, SwapConfig

JSON_FILE, CSV_FILE, PAGE_FILE = "swap.json", "swap.csv", "swap.html"
Row = Mapping[str, Any]

CHARTS = (
    ("early_bytes_share", "share of a version's bytes that were live before the rest", "{:.1%}"),
    ("mixed_token_share", "share of tokens whose step held two versions", "{:.1%}"),
    ("longest_gap_ms", "longest time between two outputs of a request, ms", "{:,.0f}"),
    ("stall_ms", "time of the slowest rank in a swap's ordered calls, median, ms", "{:.2f}"),
    ("drift_mean", "mean distance of a logprob to the strict gate's version", "{:.4f}"),
)
"""Key of a row, its words, how a value is written."""


def write_results(folder: Path, config: SwapConfig, rows: Sequence[Row]) -> None:
    """Writes the three files; `rows` are those of `swap_figures.figures`, in the order of the run."""
    (folder / JSON_FILE).write_text(json.dumps({"config": msgspec.to_builtins(config), "cases": list(rows)}, indent=1))
    (folder / CSV_FILE).write_text(as_csv(rows))
    (folder / PAGE_FILE).write_text(page(config, rows))


def as_csv(rows: Sequence[Row]) -> str:
    """One line a case; what a case does not have is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def line(row: Row) -> str:
    """What a person reads while it runs."""
    words = f"{_case(row)}: longest gap {row['longest_gap_ms']:,.0f} ms, drift {row['drift_mean']:.4f}"
    if not row["experts"]:
        return words
    return (
        f"{words}, {row['early_bytes_share']:.0%} of the bytes early, "
        f"{row['mixed_token_share']:.1%} of the tokens met two versions"
    )


def page(config: SwapConfig, rows: Sequence[Row]) -> str:
    """Works from a file, without network, in light and dark."""
    head = "".join(f"<th>{escape(key)}</th>" for key in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(_cell(value))}</td>' for value in row.values())}</tr>" for row in rows)
    return _PAGE.format(
        model=escape(config.model),
        other=escape(config.other),
        layout=escape(config.engine.layout),
        charts="".join(f"<h2>{escape(words)}</h2>{_chart(rows, key, form)}" for key, words, form in CHARTS),
        table=f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
    )


def _chart(rows: Sequence[Row], key: str, form: str) -> str:
    """A bar for each case that has this figure."""
    shown = [row for row in rows if row[key] is not None]
    most = max((row[key] for row in shown), default=0) or 1
    bars = []
    for number, row in enumerate(shown):
        y, width = 22 * number, 520 * row[key] / most
        bars.append(
            f'<text x="372" y="{y + 11}" text-anchor="end">{escape(_case(row))}</text>'
            f'<rect class="{escape(row["gate"])}" x="380" y="{y + 2}" width="{width:.1f}" height="17" rx="2"/>'
            f'<text x="{386 + width:.1f}" y="{y + 11}">{form.format(row[key])}</text>'
        )
    return f'<svg viewBox="0 0 1000 {22 * len(shown)}" role="img">{"".join(bars)}</svg>'


def _case(row: Row) -> str:
    return str(Case(*(row[field.name] for field in fields(Case))))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else f"{value}"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>expert swaps</title><style>
:root {{ color-scheme: light dark; --ink: #1b1f24; --quiet: #667080; --line: #d9dee5; --paper: #ffffff;
  --none: #97a1b0; --version: #2f6fde; --idle: #d9772b; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e9ee; --quiet: #97a1b0; --line: #333b46; --paper: #14181d;
  --none: #667080; --version: #6ea2ff; --idle: #f0a060; }} }}
body {{ margin: 0 auto; padding: 24px 28px 60px; max-width: 1080px; background: var(--paper); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 22px; margin: 0; }} h2 {{ font-size: 15px; margin: 30px 0 8px; }}
.quiet {{ color: var(--quiet); }}
svg {{ width: 100%; height: auto; display: block; }}
svg text {{ font-size: 11px; fill: var(--ink); dominant-baseline: middle; }}
.none {{ fill: var(--none); }} .version {{ fill: var(--version); }} .idle_experts {{ fill: var(--idle); }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }}
th {{ color: var(--quiet); font-weight: 400; }}
</style></head><body>
<h1>Expert swaps</h1>
<p class="quiet">Experts of {other} put into an engine ({layout}) that serves {model}, and taken out again, while
requests run. A drift is how far a token's logprob is from the one that the oldest version of its label gives the same
tokens, computed anew; that version is the one which the strict gate would have had live. Under gate version, too, it is
not 0: running requests keep KV of older versions, and a decode rounds in another way than a prefill.</p>
{charts}
<h2>All figures</h2><div class="scroll">{table}</div>
</body></html>
"""
