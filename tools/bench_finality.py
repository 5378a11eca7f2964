"""When do the bytes of a step leave, and what does it cost? Every finality policy against `whole` and against stock.

    python tools/bench_finality.py [--pairs 30] [--pp 2] [--dp 1] [--ep 1] [--microbatches 8] [--json FILE]

Starts pp x dp trainer processes on this machine. Each of them holds one small model per policy, and two stock ones. In
turns, every model takes a block of two steps; a block of a policy and the stock block of the same round are a pair.
Pieces go into lanes that only count. A block ends when everything of it has left, so that no cost is hidden.

Timeline: from the end of the last backward (of all ranks) until the first unit, half of the bytes, and all bytes have
left, in percent of the step, medians; negative: before that backward ended. It is stage 0's: in 1F1B a stage makes its
last backward from the gradient that the next stage sends at the end of its own, so all others end a backward earlier,
but for the moment that it takes them to see that it was sent. `slots`: for how long packing waited for a free slot, in
ms, median.

Two verdicts a row, with at least 30 pairs; with fewer there is none. `bytes`, with two stages and 8 microbatches: under
`speculative` and `early` half of the bytes have left before the last backward ends; under `pipelined` the first unit,
half and all of the bytes leave no later than under `whole`, step against step of the same round. It holds when the 95 %
confidence interval of that median (by the sign test) is not above 0, fails when all of it is, and is open between.
`cost`: the mean paired difference to stock in percent, with its 95 % confidence interval (of Student's t), is not above
3 % or the spread of stock; `stock again` is a second stock model.

Memory: peak of what a step allocates beyond what a stock step does, behind the warm-up, so without what `speculative`
keeps; that, too, both in fp32 copies of the rank's optimizer shard. `aborting` is speculative with every step clipped,
and never falls back. A row is invalid whose bytes are not the plan's, or with a step that was taken back where none
should be, or not where all should be. `+slice` behind a policy: every replica sends what it steps, before the gather,
instead of one replica after it; in one run with the same policy without it (`--dp 2 --policies pipelined
pipelined+slice`) that is the comparison of both.

Exit code 1 when a row fails or is invalid, or when a process fails or does not end in time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_finality_rank import ABORTING, POLICIES, SLICES, Rank

SPREAD = "stock again"
MOST_PERCENT = 3.0
LEAST_PAIRS = 30
STAGES, MICROBATCHES = 2, 8  # of the runs in which it is said when bytes leave
MOMENTS = ("first", "half", "all")


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One trainer process: all models in turns, then everything it saw to a file."""
    torch.set_num_threads(1)
    me = Rank(rank, options, f"file://{folder}/rendezvous")
    names = ["stock", SPREAD, *options.policies]
    models = {name: me.build(name) for name in names}
    for index in range(3):  # allocations, and the order of gradients
        for name in names:
            me.block(models[name], index)
    memory = {name: me.memory(models[name]) for name in names}
    blocks: dict[str, list[float]] = {name: [] for name in names}
    begin = time.monotonic()
    for pair in range(options.pairs):
        order = names[pair % len(names) :] + names[: pair % len(names)]
        for name in order:
            blocks[name].append(me.block(models[name], 100 + pair))
        if rank == 0 and pair % 10 == 9:
            print(f"{pair + 1} pairs in {time.monotonic() - begin:.0f} s", flush=True)
    seen = {name: me.seen(models[name]) for name in names}
    dist.barrier()
    torch.save({"blocks": blocks, "memory": memory, "seen": seen}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


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


def cost(name: str, ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Paired difference to stock in percent, of the slowest rank's blocks."""
    slowest = {
        key: [max(times) for times in zip(*(r["blocks"][key] for r in ranks), strict=True)] for key in (name, "stock")
    }
    percent = [100 * (a - b) / b for a, b in zip(slowest[name], slowest["stock"], strict=True)]
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


def _memory(name: str, ranks: list[dict[str, Any]]) -> dict[str, float]:
    """In fp32 copies of the rank's optimizer shard, of the rank where it is most."""
    extra = []
    for rank in ranks:
        mine, stock = rank["memory"][name], rank["memory"]["stock"]
        extra.append((mine["peak_bytes"] - stock["peak_bytes"]) / mine["shard_bytes"])
    return {
        "extra": round(max(extra), 2),
        "kept": round(max(rank["memory"][name]["kept"] for rank in ranks), 2),
        "stock_peak": round(ranks[0]["memory"]["stock"]["peak_bytes"] / ranks[0]["memory"]["stock"]["shard_bytes"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value, what in (
        ("pairs", 30, "rounds; each gives one pair per policy"),
        ("pp", 2, "pipeline stages"),
        ("dp", 1, "data-parallel replicas"),
        ("ep", 1, "expert-parallel ranks"),
        ("microbatches", 8, "per step"),
        ("layers", 8, "of the model"),
        ("hidden", 192, "width of the model; its heads are 32 wide"),
        ("bucket", 1_000_000, "elements at which a bucket ends"),
        ("slots", 4, "packed pieces that may wait, per lane"),
        ("limit", 3600, "seconds after which everything is ended"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} ({value})")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES + SLICES)
    parser.add_argument("--json", type=Path, help="also write all rows there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megastream-finality-") as folder:
        context = multiprocessing.get_context("spawn")
        world = options.pp * options.dp
        processes = [context.Process(target=rank_main, args=(rank, options, folder)) for rank in range(world)]
        for process in processes:
            process.start()
        await_end(processes, options.limit)
        ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
    rows = {name: timeline(name, ranks) for name in options.policies}
    costs = {name: cost(name, ranks) for name in (SPREAD, *options.policies)}
    memory = {name: _memory(name, ranks) for name in rows}
    is_said = (options.pp, options.microbatches) == (STAGES, MICROBATCHES)
    verdicts = {
        name: verdict(row, costs[name], costs[SPREAD], not_above_0(name, rows) if is_said else [])
        for name, row in rows.items()
    }
    show(rows, costs, memory, verdicts, statistics.median(ranks[0]["blocks"]["stock"]))
    if options.json is not None:
        figures = {"timeline": rows, "cost": costs, "memory": memory, "verdict": verdicts}
        options.json.write_text(json.dumps(figures, indent=1))
    words = {word for one in verdicts.values() for word in one.values()}
    raise SystemExit(1 if words & {"invalid", "fails"} else 0)


def await_end(processes: list[Any], limit_s: float) -> None:
    """SystemExit when one fails, or any is left after the limit; the others are ended then."""
    end = time.monotonic() + limit_s
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes) or time.monotonic() > end:
            break
        time.sleep(0.1)
    left = [process for process in processes if process.is_alive()]
    failed = any(process.exitcode for process in processes)
    for process in left:
        process.kill()
        process.join()
    if failed:
        raise SystemExit("a trainer process failed; its output is above")
    if left:
        raise SystemExit(f"{len(left)} trainer processes were still there after {limit_s:g} s; raise --limit")


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


def show(
    rows: dict[str, Any],
    costs: dict[str, Any],
    memory: dict[str, Any],
    verdicts: dict[str, dict[str, str]],
    block_s: float,
) -> None:
    print(
        f"median stock block of two steps {1e3 * block_s:.0f} ms; stock again {_cost(costs[SPREAD])}; "
        f"limit {limit_percent(costs[SPREAD]):.1f} %; {costs[SPREAD]['pairs']} pairs"
        + (f", a verdict needs {LEAST_PAIRS}" if costs[SPREAD]["pairs"] < LEAST_PAIRS else "")
    )
    print(
        f"{'policy':>17} {'first':>7} {'half':>7} {'all':>7} {'bytes':>8} {'slots':>7} {'cost %':>16} {'cost':>8} "
        f"{'peak':>6} {'kept':>6} {'aborts':>7}"
    )
    for name, row in rows.items():
        print(
            f"{name:>17} {row['first']:7.1f} {row['half']:7.1f} {row['all']:7.1f} {verdicts[name]['bytes']:>8} "
            f"{row['slot_ms']:7.1f} {_cost(costs[name]):>16} {verdicts[name]['cost']:>8} "
            f"{memory[name]['extra']:6.2f} {memory[name]['kept']:6.2f} {row['aborts']:7d}"
        )


def _cost(one: dict[str, float]) -> str:
    return f"{one['mean']:+.2f} +- {one['ci']:.2f}"


if __name__ == "__main__":
    main()
