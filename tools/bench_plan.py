"""How long a plan takes, and that its time grows linearly with its copies. One process, one core, no torch.

    python tools/bench_plan.py [--model M] [--trainer "tp4 ep8 dp8"] [--stages 4] [--engine "tp8 dp8 ep64"]

The model is planned with a quarter, half, three quarters and all of its layers. `layouts`: all ranks' layouts from
layout strings; `plan`: check, join, cut, proof and digest; `pieces`: those of all ranks as objects; `all`: these three;
`one rank`: what the last engine rank does, from the bytes of all layouts to its own pieces. Processor seconds of this
process; the fit is by least squares over plan + pieces.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megastream.families import family_of
from megastream.families.shipped import shape_of_model
from megastream.layout.mesh import Mesh, parse_engine_mesh, parse_trainer_mesh
from megastream.layout.synthetic import engine_layouts, trainer_layouts
from megastream.layout.wire import decode_layouts, encode_layout
from megastream.plan import build_plan

SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Row:
    """Processor seconds of one size."""

    tensors: int
    copies: int
    layouts_s: float
    plan_s: float
    pieces_s: float
    own_s: float


def measure(model: str, trainer: Mesh, engine: Mesh, share: float) -> Row:
    whole = shape_of_model(model)
    num_layers = max(round(whole.num_layers * share), trainer.pp)
    shape, family = replace(whole, num_layers=num_layers), family_of(whole)
    base, extra = divmod(num_layers, trainer.pp)
    # Remainder layers go to the middle stages, as people place them: pp4(23,24,24,23).
    middle = sorted(range(trainer.pp), key=lambda stage: abs(stage - (trainer.pp - 1) / 2))[:extra]
    mesh = replace(trainer, stages=tuple(base + (stage in middle) for stage in range(trainer.pp)))
    options: dict[str, Any] = dict(kind="stream", piece_bytes=16 << 20, experts_per_unit=8, finality="pipelined")
    times = [time.process_time()]
    sides = trainer_layouts(family, shape, mesh), engine_layouts(family, shape, engine)
    times.append(time.process_time())
    plan = build_plan(*sides, family, **options)
    times.append(time.process_time())
    assert len(plan.pieces[:]) == len(plan.pieces)
    times.append(time.process_time())
    blobs = [[encode_layout(layout) for layout in side] for side in sides]
    started = time.process_time()
    last = engine.world_size - 1
    own = build_plan(*map(decode_layouts, blobs), family, **options, own=("engine", last))
    assert own.by_target[last] and own.digest == plan.digest
    own_s = time.process_time() - started
    return Row(len(family.tensors(shape)), int(plan.pieces.num_copies.sum()), *np.diff(times).tolist(), own_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-235B-A22B")
    parser.add_argument("--trainer", default="tp4 ep8 dp8")
    parser.add_argument("--engine", default="tp8 dp8 ep64")
    parser.add_argument("--stages", type=int, default=4)
    arguments = parser.parse_args()
    trainer = replace(parse_trainer_mesh(arguments.trainer), pp=arguments.stages)
    engine = parse_engine_mesh(arguments.engine)
    print(f"{arguments.model}, {trainer.world_size} trainer ranks to {engine.world_size} engine ranks")
    names = ("layouts", "plan", "pieces", "all", "one rank")
    print(f"{'tensors':>8} {'copies':>9} {' '.join(f'{name:>8}' for name in names)}   us per copy")
    rows = [measure(arguments.model, trainer, engine, share) for share in SHARES]
    for row in rows:
        each = (row.plan_s + row.pieces_s) / row.copies * 1e6
        seconds = (row.layouts_s, row.plan_s, row.pieces_s, row.layouts_s + row.plan_s + row.pieces_s, row.own_s)
        print(f"{row.tensors:>8,} {row.copies:>9,} {' '.join(f'{number:>7.2f}s' for number in seconds)}   {each:.1f}")
    _fit(np.array([row.copies for row in rows]), np.array([row.plan_s + row.pieces_s for row in rows]))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


def _fit(copies: npt.NDArray[Any], seconds: npt.NDArray[Any]) -> None:
    slope, start = np.polyfit(copies, seconds, 1)
    rest = seconds - (slope * copies + start)
    spread = 1 - (rest**2).sum() / ((seconds - seconds.mean()) ** 2).sum()
    print(f"fit: {start:.2f} s + {slope * 1e6:.2f} us per copy, r2 = {spread:.4f}")


if __name__ == "__main__":
    main()
