"""What bench_finality.py makes of what the ranks saw: rows, intervals, verdicts, and one policy against another."""

from __future__ import annotations

import math
import statistics
from typing import Any

ABORTING = "aborting"
POLICIES = ("whole", "pipelined", "speculative", "early", ABORTING)
SLICES = ("pipelined+slice", "speculative+slice", "early+slice")
MOST_PERCENT = 3.0
LEAST_PAIRS = 30
MOMENTS = ("first", "half", "all")


def timeline(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps of one policy, from what all ranks saw; `percent` has the moments of every step."""
    seen = [rank["seen"][name] for rank in ranks]
    rows: dict[str, list[float]] = {"first": [], "half": [], "all": [], "slot_ms": []}
    wrong = 0
    for steps in zip(*(one["steps"] for one in seen), strict=True):
        last_backward = max(step["backward_end"] for step in steps)
        step_s = max(step["end"] for step in steps) - min(step["begin"] for step in steps)
        sent = sorted(event for step in steps for event in step["sent"])
        total = sum(size for _, _, size in sent)
        aborted = any(step["attempt"] > 0 for step in steps)
        wrong += total != seen[0]["plan_bytes"] or aborted != name.startswith(ABORTING)
        left, done, half = dict(seen[0]["unit_bytes"]), 0, 0.0
        first = 0.0
        for at, unit, size in sent:
            done += size
            left[unit] -= size
            first = first or (at if left[unit] == 0 else 0.0)
            half = half or (at if 2 * done >= total else 0.0)
        for key, at in zip(MOMENTS, (first, half, sent[-1][0]), strict=True):
            rows[key].append(100 * (at - last_backward) / step_s)
        rows["slot_ms"].append(1e3 * max(step["slot_wait_s"] for step in steps))
    medians = {key: round(statistics.median(values), 1) for key, values in rows.items()}
    percent = {key: rows[key] for key in MOMENTS}
    return {
        **medians,
        "steps": len(rows["all"]),
        "invalid_steps": wrong,
        "aborts": seen[0]["aborts"],
        "plan_bytes": seen[0]["plan_bytes"],
        "plan_pieces": seen[0]["plan_pieces"],
        "percent": percent,
    }


def not_above_0(name: str, rows: dict[str, Any]) -> list[list[float]]:
    """What must not be above 0, in the middle of all steps, for the row's bytes to leave when its policy says."""
    policy, percent = name.partition("+")[0], rows[name]["percent"]
    if policy in ("speculative", "early"):
        return [percent["half"]]
    if policy == "pipelined" and "whole" in rows:
        whole = rows["whole"]["percent"]
        return [[mine - its for mine, its in zip(percent[key], whole[key], strict=True)] for key in MOMENTS]
    return []


def cost(name: str, ranks: list[dict[str, Any]], other: str = "stock") -> dict[str, float]:
    """Paired difference to `other` in percent, of the slowest rank's blocks."""
    mine, its = (
        [max(times) for times in zip(*(r["blocks"][key] for r in ranks), strict=True)] for key in (name, other)
    )
    percent = [100 * (a - b) / b for a, b in zip(mine, its, strict=True)]
    spread = student_t(len(percent) - 1) * statistics.stdev(percent) / len(percent) ** 0.5
    return {"mean": round(statistics.mean(percent), 2), "ci": round(spread, 2), "pairs": len(percent)}


def student_t(freedom: int) -> float:
    """The 97.5 % quantile for so many degrees of freedom: Fisher's expansion, right to 0.001 from 8 on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def memory_of(name: str, ranks: list[dict[str, Any]]) -> dict[str, float]:
    """In fp32 copies of the rank's optimizer shard, of the rank where it is most."""
    extra = []
    for rank in ranks:
        mine, stock = rank["memory"][name], rank["memory"]["stock"]
        extra.append((mine["peak_bytes"] - stock["peak_bytes"]) / mine["shard_bytes"])
    return {
        "extra": round(max(extra), 2),
        "kept": round(max(rank["memory"][name]["kept"] for rank in ranks), 2),
        "bucket": round(max(rank["memory"][name]["bucket"] for rank in ranks), 2),
        "stock_peak": round(ranks[0]["memory"]["stock"]["peak_bytes"] / ranks[0]["memory"]["stock"]["shard_bytes"], 2),
    }


def sliced(name: str, rows: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of `+slice` against that of the same policy without it, step against step and block against block.

    Moments are [low, median, high] in percent of the step, `block` the paired difference in percent.
    """
    other = name.partition("+")[0]
    mine, its = rows[name], rows[other]
    moments = {}
    for key in MOMENTS:
        apart = [a - b for a, b in zip(mine["percent"][key], its["percent"][key], strict=True)]
        low, high = median_interval(apart)
        moments[key] = [low, statistics.median(apart), high]
    block = cost(name, ranks, other)
    valid = not mine["invalid_steps"] + its["invalid_steps"] and mine["plan_bytes"] == its["plan_bytes"]
    pieces = mine["plan_pieces"], its["plan_pieces"]
    return {
        "better": better(moments["all"], block) if valid else "invalid",
        **moments,
        "block": block,
        "pieces": pieces,
    }


def better(last: list[float], block: dict[str, float]) -> str:
    """`slice` when the last byte leaves earlier or a block takes less time, and neither is the other way round."""
    between = (last[0], last[-1]), (block["mean"] - block["ci"], block["mean"] + block["ci"])
    gains, losses = any(high < 0 for _, high in between), any(low > 0 for low, _ in between)
    return {(True, False): "slice", (False, True): "replica"}.get((gains, losses), "open")


def limit_percent(again: dict[str, float]) -> float:
    """What a policy may cost: 3 %, or the spread of stock against stock where that is larger."""
    return max(MOST_PERCENT, abs(again["mean"]) + again["ci"])


def verdict(
    row: dict[str, Any], one: dict[str, float], again: dict[str, float], moments: list[list[float]]
) -> dict[str, str]:
    """On what the row costs, and on its `bytes`: '-' without `moments`, else the worst word on any of them."""
    if row["invalid_steps"] or not row["steps"]:
        return dict.fromkeys(("cost", "bytes"), "invalid")
    if one["pairs"] < LEAST_PAIRS:
        return dict.fromkeys(("cost", "bytes"), "few")
    cost = judged(one["mean"] - one["ci"], one["mean"] + one["ci"], limit_percent(again))
    words = {judged(*median_interval(values), 0.0) for values in moments}
    return {"cost": cost, "bytes": next((word for word in ("fails", "open", "holds") if word in words), "-")}


def judged(low: float, high: float, limit: float) -> str:
    """Whether what lies between `low` and `high` is at most the limit."""
    return "holds" if high <= limit else "fails" if low > limit else "open"


def median_interval(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, by the sign test: two of the sorted values, with few the extremes."""
    ordered, below, tail = sorted(values), 0, 1
    while tail <= 0.025 * 2 ** len(ordered):
        below += 1
        tail += math.comb(len(ordered), below)
    return ordered[max(below, 1) - 1], ordered[-max(below, 1)]
