"""How long a plan takes, and that its time grows linearly with its copies. One process at a time, one core, no torch.

    python tools/bench_plan.py [--runs 3]                                            # both pairs below
    python tools/bench_plan.py --model M --trainer "tp4 pp4 ep8 dp8" --engine "tp8 dp8 ep64"

The model is planned with a quarter, half, three quarters and all of its layers. `layouts`: all ranks' layouts from
layout strings; `plan`: check, join, cut, proof and digest; `pieces`: those of all ranks as objects; `all`: these three.
`trainer rank`, `engine rank`: what the last one does when it is bound, from the bytes of all layouts to its own pieces.
Processor seconds of this process, the least of `--runs`; the fit is by least squares over plan + pieces; `peak`: the
largest resident memory of the process when all pieces are made.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megastream.families import family_of
from megastream.families.shipped import shape_of_model
from megastream.layout.mesh import Mesh, parse_engine_mesh, parse_trainer_mesh
from megastream.layout.shard import Side
from megastream.layout.synthetic import engine_layouts, trainer_layouts
from megastream.layout.wire import decode_layouts, encode_layout
from megastream.plan import build_plan
from megastream.plan.types import Plan

SHARES = (0.25, 0.5, 0.75, 1.0)
PAIRS = (
    ("Qwen3-235B-A22B", "tp4 pp4 ep8 dp8", "tp8 dp8 ep64"),
    ("Kimi-K2", "tp8 etp1 pp8 ep32 dp4", "tp8 dp16 ep128"),
)
OPTIONS: dict[str, Any] = dict(kind="stream", piece_bytes=16 << 20, experts_per_unit=8, finality="pipelined")


@dataclass(frozen=True)
class Row:
    """One size, and its processor seconds."""

    tensors: int
    copies: int
    peak_gib: float
    layouts_s: float
    plan_s: float
    pieces_s: float
    trainer_rank_s: float
    engine_rank_s: float


def measure(model: str, trainer: Mesh, engine: Mesh, share: float) -> Row:
    whole = shape_of_model(model)
    num_layers = max(round(whole.num_layers * share), trainer.pp)
    shape, family = replace(whole, num_layers=num_layers), family_of(whole)
    mesh = replace(trainer, stages=_stages(num_layers, trainer.pp))
    times = [time.process_time()]
    sides = trainer_layouts(family, shape, mesh), engine_layouts(family, shape, engine)
    times.append(time.process_time())
    plan = build_plan(*sides, family, **OPTIONS)
    times.append(time.process_time())
    assert len(plan.pieces[:]) == len(plan.pieces)
    times.append(time.process_time())
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    blobs = [[encode_layout(layout) for layout in side] for side in sides]
    ranks: tuple[tuple[Side, int], ...] = ("trainer", mesh.world_size - 1), ("engine", engine.world_size - 1)
    own_s = [_own_s(blobs, family, own, plan) for own in ranks]
    copies = int(plan.pieces.num_copies.sum())
    return Row(len(family.tensors(shape)), copies, peak_gib, *np.diff(times).tolist(), *own_s)


def _stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """Remainder layers go to the middle stages, as people place them: pp4(23,24,24,23)."""
    base, extra = divmod(num_layers, pp)
    middle = sorted(range(pp), key=lambda stage: abs(stage - (pp - 1) / 2))[:extra]
    return tuple(base + (stage in middle) for stage in range(pp))


def _own_s(blobs: Sequence[Sequence[bytes]], family: Any, own: tuple[Side, int], whole: Plan) -> float:
    started = time.process_time()
    plan = build_plan(*map(decode_layouts, blobs), family, **OPTIONS, own=own)
    pieces = (plan.by_source if own[0] == "trainer" else plan.by_target)[own[1]]
    seconds = time.process_time() - started
    assert pieces and plan.digest == whole.digest
    return seconds


def _best(runs: Sequence[Row]) -> Row:
    """The least seconds of several runs of one size; the memory of the first, which the others' lies on top of."""
    seconds = zip(*(astuple(run)[3:] for run in runs), strict=True)
    return Row(*astuple(runs[0])[:3], *map(min, seconds))


def _print(model: str, trainer: Mesh, engine: Mesh, num_runs: int) -> None:
    stages = _stages(shape_of_model(model).num_layers, trainer.pp)
    print(f"{model}, {replace(trainer, stages=stages)} ({trainer.world_size} ranks) to {engine} ({engine.world_size})")
    names = ("layouts", "plan", "pieces", "all", "trainer rank", "engine rank")
    print(f"{'tensors':>8} {'copies':>9} {' '.join(f'{name:>12}' for name in names)}  us per copy      peak")
    rows = []
    for share in SHARES:
        row = _best([measure(model, trainer, engine, share) for _ in range(num_runs)])
        rows.append(row)
        every = row.layouts_s, row.plan_s, row.pieces_s
        seconds = (*every, sum(every), row.trainer_rank_s, row.engine_rank_s)
        each = (row.plan_s + row.pieces_s) / row.copies * 1e6
        numbers = " ".join(f"{number:>10.2f} s" for number in seconds)
        print(f"{row.tensors:>8,} {row.copies:>9,} {numbers} {each:>12.1f} {row.peak_gib:>5.2f} GiB", flush=True)
    _fit(np.array([row.copies for row in rows]), np.array([row.plan_s + row.pieces_s for row in rows]))


def _fit(copies: npt.NDArray[Any], seconds: npt.NDArray[Any]) -> None:
    slope, start = np.polyfit(copies, seconds, 1)
    rest = seconds - (slope * copies + start)
    spread = 1 - (rest**2).sum() / ((seconds - seconds.mean()) ** 2).sum()
    print(f"fit: {start:.2f} s + {slope * 1e6:.2f} us per copy, r2 = {spread:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--trainer", default=PAIRS[0][1])
    parser.add_argument("--engine", default=PAIRS[0][2])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.model:
        meshes = parse_trainer_mesh(arguments.trainer), parse_engine_mesh(arguments.engine)
        _print(arguments.model, *meshes, arguments.runs)
        return
    for model, trainer, engine in PAIRS:
        # A process of its own for each, so that memory is that of one.
        sides = ["--trainer", trainer, "--engine", engine, "--runs", str(arguments.runs)]
        subprocess.run([sys.executable, __file__, "--model", model, *sides], check=True)


if __name__ == "__main__":
    main()
