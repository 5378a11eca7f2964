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
instead of one replica after it. In one run with the same policy without it (`--dp 2 --policies pipelined
pipelined+slice`) both are compared, step against step and block against block of the same round: medians of when bytes
leave, and the mean difference of the blocks, with their 95 % intervals, as above. The better one is that whose last
byte leaves earlier, or whose blocks are shorter, when it is not worse in the other; otherwise the comparison is open.

With `--lanes gloo` (ipc, nccl) pieces go over that transport into processes, one per engine rank, that check them and
throw them away, as an engine's threads would; a piece has left when its acknowledgement is there.

Exit code 1 when a row fails or is invalid, or when a process fails or does not end in time.
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
from bench_finality_figures import (
    LEAST_PAIRS,
    MOMENTS,
    POLICIES,
    SLICES,
    cost,
    limit_percent,
    memory_of,
    not_above_0,
    sliced,
    timeline,
    verdict,
)
from bench_finality_lanes import Addresses, start_receivers
from bench_finality_rank import Rank

SPREAD = "stock again"
STAGES, MICROBATCHES = 2, 8  # of the runs in which it is said when bytes leave


def rank_main(rank: int, options: argparse.Namespace, folder: str, addresses: Addresses) -> None:
    """One trainer process: all models in turns, then everything it saw to a file."""
    torch.set_num_threads(1)
    me = Rank(rank, options, f"file://{folder}/rendezvous", addresses)
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
        for name in order if pair % 2 == 0 else reversed(order):  # nobody always comes behind the same one
            blocks[name].append(me.block(models[name], 100 + pair))
        if rank == 0 and pair % 10 == 9:
            print(f"{pair + 1} pairs in {time.monotonic() - begin:.0f} s", flush=True)
    seen = {name: me.seen(models[name]) for name in names}
    for built in models.values():
        me.close(built)
    dist.barrier()
    torch.save({"blocks": blocks, "memory": memory, "seen": seen}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


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
    parser.add_argument("--lanes", default="count", choices=("count", "gloo", "ipc", "nccl"), help="as above (count)")
    parser.add_argument("--json", type=Path, help="also write all rows there")
    options = parser.parse_args()
    ranks = train(options)
    rows = {name: timeline(name, ranks) for name in options.policies}
    costs = {name: cost(name, ranks) for name in (SPREAD, *options.policies)}
    memory = {name: memory_of(name, ranks) for name in rows}
    is_said = (options.pp, options.microbatches) == (STAGES, MICROBATCHES)
    verdicts = {
        name: verdict(row, costs[name], costs[SPREAD], not_above_0(name, rows) if is_said else [])
        for name, row in rows.items()
    }
    slices = {name: sliced(name, rows, ranks) for name in rows if name in SLICES and name.partition("+")[0] in rows}
    show(rows, costs, memory, verdicts, statistics.median(ranks[0]["blocks"]["stock"]))
    show_slices(slices)
    if options.json is not None:
        figures = {"timeline": rows, "cost": costs, "memory": memory, "verdict": verdicts, "slices": slices}
        options.json.write_text(json.dumps(figures, indent=1))
    words = {word for one in verdicts.values() for word in one.values()}
    raise SystemExit(1 if words & {"invalid", "fails"} else 0)


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts all processes; what each trainer rank saw. SystemExit as of `await_end`."""
    with tempfile.TemporaryDirectory(prefix="megastream-finality-") as folder:
        context = multiprocessing.get_context("spawn")
        world = options.pp * options.dp
        receivers, addresses = start_receivers(context, options.lanes, options.policies, world)
        processes = [
            context.Process(target=rank_main, args=(rank, options, folder, addresses)) for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            await_end(processes, options.limit)
        finally:
            for receiver in receivers:
                receiver.kill()
                receiver.join()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


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


def show_slices(slices: dict[str, Any]) -> None:
    """[low, median, high] of 95 % in percent of the step; negative: the slice is earlier, or takes less time."""
    for name, one in slices.items():
        moments = ", ".join(f"{key} {one[key][1]:+.2f} [{one[key][0]:+.2f}, {one[key][2]:+.2f}]" for key in MOMENTS)
        block, pieces = _cost(one["block"]), "{} pieces for {}".format(*one["pieces"])
        print(f"{name} against the same without: {moments}, block {block}, {pieces}; better: {one['better']}")


def _cost(one: dict[str, float]) -> str:
    return f"{one['mean']:+.2f} +- {one['ci']:.2f}"


if __name__ == "__main__":
    main()
