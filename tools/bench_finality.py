"""When do the bytes of a step leave, and what does it cost? Every finality policy against `whole` and against stock.

    python tools/bench_finality.py [--pairs 30] [--pp 2] [--dp 1] [--ep 1] [--microbatches 8] [--json FILE]

Starts pp x dp trainer processes on this machine. Each of them holds one small model per policy, and two stock ones. In
turns, every model takes a block of two steps; a block of a policy and the stock block of the same round are a pair.
Pieces go into lanes that only count. A block ends when everything of it has left, so that no cost is hidden.

Timeline: from the end of the last backward (of all ranks) until the first unit, half of the bytes, and all bytes have
left, in percent of the step, medians; negative: before that backward ended. Cost: the mean paired difference to stock
in percent, with its 95 % confidence interval; `stock again` is a second stock model. Memory: peak of what a step
allocates beyond what a stock step does, and what `speculative` keeps, both in fp32 copies of the rank's optimizer
shard. A row whose bytes are not the plan's is invalid. `aborting` is speculative with every step clipped. `+slice`
behind a policy: every replica sends what it steps, before the gather, instead of one replica after it; in one run with
the same policy without it (`--dp 2 --policies pipelined pipelined+slice`) that is the comparison of both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_finality_rank import POLICIES, SLICES, Rank

SPREAD = "stock again"
MOST_PERCENT = 3.0
T_95 = 2.045
"""Student's t for 30 pairs."""


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
    """Medians over the steps of one policy, from what all ranks saw."""
    seen = [rank["seen"][name] for rank in ranks]
    rows: dict[str, list[float]] = {"first": [], "half": [], "all": [], "lease_ms": []}
    wrong = 0
    for steps in zip(*(one["steps"] for one in seen), strict=True):
        last_backward = max(step["backward_end"] for step in steps)
        step_s = max(step["end"] for step in steps) - min(step["begin"] for step in steps)
        sent = sorted(event for step in steps for event in step["sent"])
        total = sum(size for _, _, size in sent)
        wrong += total != seen[0]["plan_bytes"]
        left, done, half = dict(seen[0]["unit_bytes"]), 0, 0.0
        first = 0.0
        for at, unit, size in sent:
            done += size
            left[unit] -= size
            first = first or (at if left[unit] == 0 else 0.0)
            half = half or (at if 2 * done >= total else 0.0)
        for key, at in (("first", first), ("half", half), ("all", sent[-1][0])):
            rows[key].append(100 * (at - last_backward) / step_s)
        rows["lease_ms"].append(1e3 * max(step["slot_wait_s"] for step in steps))
    medians = {key: round(statistics.median(values), 1) for key, values in rows.items()}
    return {**medians, "steps": len(rows["all"]), "invalid_steps": wrong, "aborts": seen[0]["aborts"]}


def cost(name: str, ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Paired difference to stock in percent, of the slowest rank's blocks."""
    slowest = {
        key: [max(times) for times in zip(*(r["blocks"][key] for r in ranks), strict=True)] for key in (name, "stock")
    }
    percent = [100 * (a - b) / b for a, b in zip(slowest[name], slowest["stock"], strict=True)]
    spread = T_95 * statistics.stdev(percent) / len(percent) ** 0.5
    return {"mean": round(statistics.mean(percent), 2), "ci": round(spread, 2), "pairs": len(percent)}


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
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a trainer process failed; its output is above")
        ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
    rows = {name: timeline(name, ranks) for name in options.policies}
    costs = {name: cost(name, ranks) for name in (SPREAD, *options.policies)}
    memory = {name: _memory(name, ranks) for name in rows}
    show(rows, costs, memory, statistics.median(ranks[0]["blocks"]["stock"]))
    if options.json is not None:
        options.json.write_text(json.dumps({"timeline": rows, "cost": costs, "memory": memory}, indent=1))


def show(rows: dict[str, Any], costs: dict[str, Any], memory: dict[str, Any], block_s: float) -> None:
    spread = abs(costs[SPREAD]["mean"]) + costs[SPREAD]["ci"]
    limit = max(MOST_PERCENT, spread)
    print(
        f"median stock block of two steps {1e3 * block_s:.0f} ms; stock again {_cost(costs[SPREAD])}; "
        f"limit {limit:.1f} %"
    )
    print(
        f"{'policy':>17} {'first':>7} {'half':>7} {'all':>7} {'cost %':>16} {'':>8} "
        f"{'peak':>6} {'kept':>6} {'aborts':>7}"
    )
    for name, row in rows.items():
        mean, ci = costs[name]["mean"], costs[name]["ci"]
        verdict = "holds" if mean + ci <= limit else "fails" if mean - ci > limit else "open"
        if row["invalid_steps"]:
            verdict = "invalid"
        print(
            f"{name:>17} {row['first']:7.1f} {row['half']:7.1f} {row['all']:7.1f} {_cost(costs[name]):>16} "
            f"{verdict:>8} {memory[name]['extra']:6.2f} {memory[name]['kept']:6.2f} {row['aborts']:7d}"
        )


def _cost(one: dict[str, float]) -> str:
    return f"{one['mean']:+.2f} +- {one['ci']:.2f}"


if __name__ == "__main__":
    main()
