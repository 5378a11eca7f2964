"""Many updates in a row into one engine that never stops generating: does anything grow?

    .venv/bin/python -m tools.soak [--updates 2000] [--layout pp2] [--every 50] [--json FILE]

Run it from the checkout. A real vLLM with two ranks serves the tiny model of the tests, four trainer ranks without
Megatron (threads of this process) stream a new version as soon as the last one is live, over gloo lanes and the
embedded control plane, and requests go on all the time. Every `--every` updates one line: updates a second, and of
every process resident memory and open files; their segments in /dev/shm; keys of the control plane, entries of its log.

Behind the last update the same requests go on for --alone-s seconds without any: what a process's memory grows by for a
token then is no update's doing, and is taken off.

It fails (exit code 1) when, behind the first fifth of the updates, a process's memory grows by more than
--kib-per-update (fit over all samples), files, segments or keys have become more than they were, a live parameter has
moved, or a token met two versions or carries the wrong one. The control plane's memory is reported only: its log grows
until the server trims it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from megastream.control.embedded import EmbeddedServer
from megastream.rl import owned
from tests.helpers import reveal
from tests.helpers.engine import Engine, below
from tests.helpers.reveal_trainer import Orders, RevealTrainer, training
from tests.helpers.tiny_moe import Weights, write_checkpoint
from tests.helpers.traffic import count

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_size": 2},
    "tp2ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
STREAMS = 6
ALONE = 20
"""Samples without updates."""
SERVERS = ("valkey", "redis")
CONSOLE = Console(highlight=False)


def processes() -> dict[int, str]:
    """This process and all below it: pid to name."""
    return {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in below(os.getpid())}


def resident_kib(pid: int) -> int:
    """Memory of the process's own and shared segments in RAM, divided among those that share it. Without mapped files:
    the share of a library grows whenever anybody else on the machine ends who had it, too."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


@dataclass(frozen=True)
class Sample:
    updates: int
    seconds: float
    kib: dict[int, int]
    files: dict[int, int]
    segments: int
    keys: int
    log_entries: int
    tokens: int


class CachedTrainer(RevealTrainer):
    """Its weights are made once, so that filling buffers is a copy, as a real step's last part is."""

    @staticmethod
    def weights(version: int) -> Weights:
        return _weights(version % reveal.BASE)


@functools.cache
def _weights(digit: int) -> Weights:
    return reveal.weights(digit)


@dataclass
class Traffic:
    """Requests without a break; only the counts of their tokens are kept."""

    totals: dict[str, int] = field(default_factory=lambda: {"tokens": 0, "mixed": 0, "mislabelled": 0})
    ending: bool = False

    async def run(self, engine: Engine) -> None:
        await asyncio.gather(*(self._stream(engine, index) for index in range(STREAMS)))

    async def _stream(self, engine: Engine, index: int) -> None:
        for number in itertools.count():
            if self.ending:
                return
            prompt = [20] * (3 + (37 * number + 11 * index) % 150)
            answer = await engine.ask(f"t{index}-{number}", prompt, 20 + (13 * number + 7 * index) % 60)
            for key, value in count([answer]).items():
                self.totals[key] += value


class Soak:
    """`wrong` is what was found, complete behind `run`."""

    def __init__(self, engine: Engine, url: str, options: argparse.Namespace):
        self.engine, self.options = engine, options
        self.redis = redis.Redis.from_url(url)
        self.names = processes()
        self.segments: set[str] = set()
        """Those in /dev/shm that one of the processes was seen to use, whether or not it uses them still."""
        self.samples: list[Sample] = []
        self.alone: list[Sample] = []
        """Without updates, behind the last one."""
        self.traffic = Traffic()
        self.wrong: list[str] = []
        self.begin_s = time.monotonic()

    def sample(self, updates: int) -> Sample:
        """One line, and what it says."""
        self.segments |= {name for pid in self.names for name in owned.mapped(pid)}
        keys = sorted(self.redis.keys())
        one = Sample(
            updates,
            time.monotonic() - self.begin_s,
            {pid: resident_kib(pid) for pid in self.names},
            {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in self.names},
            sum((owned.SHM / name).exists() for name in self.segments),
            len(keys),
            sum(self.redis.xlen(key) for key in keys if self.redis.type(key) == b"stream"),
            self.traffic.totals["tokens"],
        )
        memory = " ".join(f"{kib / 1024:.0f}" for kib in one.kib.values())
        CONSOLE.print(
            f"{updates:5d} updates in {one.seconds:4.0f} s; resident MiB {memory}; files {sum(one.files.values())}; "
            f"segments {one.segments}; keys {one.keys}, log {one.log_entries}; tokens {one.tokens}"
        )
        return one

    async def run(self, orders: Orders) -> None:
        """All updates."""
        running = asyncio.create_task(self.traffic.run(self.engine))
        try:
            before = await self.engine.ranks("feed_addresses")
            for version in range(1, self.options.updates + 1):
                await asyncio.to_thread(orders.update, version)
                if version % self.options.every == 0:
                    self.samples.append(self.sample(version))
            after = await self.engine.ranks("feed_addresses")
            orders.end()
            for _ in range(ALONE):
                await asyncio.sleep(self.options.alone_s / ALONE)
                self.alone.append(self.sample(version))
        finally:
            self.traffic.ending = True
            await running
        kib_per_update = self.options.kib_per_update
        self.wrong = grown(self.names, settled(self.samples), self.alone, kib_per_update)
        self.wrong += moved(before, after) + bad_tokens(self.traffic.totals)


def settled(samples: list[Sample]) -> list[Sample]:
    """Those behind the first fifth of the updates."""
    return [one for one in samples if one.updates > samples[-1].updates / 5]


def growth(samples: list[Sample], alone: list[Sample], pid: int) -> float:
    """KiB per update, beyond what the tokens of the same time cost without updates; least squares."""
    per_token = max(slope([one.tokens for one in alone], [one.kib[pid] for one in alone]), 0.0)
    return slope([one.updates for one in samples], [one.kib[pid] - per_token * one.tokens for one in samples])


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Least squares; 0 where nothing was measured, or all of it at one place."""
    middle, mean = (sum(each) / max(len(at), 1) for each in (at, values))
    spread = sum((x - middle) ** 2 for x in at)
    return sum((x - middle) * (y - mean) for x, y in zip(at, values, strict=True)) / spread if spread else 0.0


def grown(names: dict[int, str], samples: list[Sample], alone: list[Sample], kib_per_update: float) -> list[str]:
    """What became more from the first sample to the last, a line each."""
    wrong = []
    first, last = samples[0], samples[-1]
    for pid, name in names.items():
        if not name.startswith(SERVERS) and (rate := growth(samples, alone, pid)) > kib_per_update:
            wrong.append(f"{name} ({pid}) grows by {rate:.2f} KiB per update")
        if last.files[pid] > first.files[pid]:
            wrong.append(f"{name} ({pid}) had {first.files[pid]} files open, and now {last.files[pid]}")
    for what, old, new in (("segments", first.segments, last.segments), ("keys", first.keys, last.keys)):
        if new > old:
            wrong.append(f"there were {old} {what}, and now there are {new}")
    return wrong


def moved(before: list[dict[str, int]], after: list[dict[str, int]]) -> list[str]:
    """Live parameters and buffers of each rank that do not lie where they lay."""
    wrong = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        wrong += [f"{name} of rank {rank} has moved" for name in old if old[name] != new.get(name)]
    return wrong


def bad_tokens(totals: dict[str, int]) -> list[str]:
    tokens = totals["tokens"]
    return [f"{number} of {tokens} tokens are {key}" for key, number in totals.items() if key != "tokens" and number]


def table(names: dict[int, str], samples: list[Sample], alone: list[Sample]) -> Table:
    out = Table(title=f"from update {samples[0].updates} to {samples[-1].updates}")
    for heading in ("process", "resident, first", "last", "KiB per update", "without them", "files, first", "last"):
        out.add_column(heading, justify="left" if heading == "process" else "right")
    first, last = samples[0], samples[-1]
    for pid, name in names.items():
        memory = (f"{one.kib[pid] / 1024:.1f} MiB" for one in (first, last))
        files = (str(one.files[pid]) for one in (first, last))
        per_update = slope([one.updates for one in samples], [one.kib[pid] for one in samples])
        beyond = growth(samples, alone, pid)
        out.add_row(name, *memory, f"{per_update:.2f}", f"{per_update - beyond:.2f}", *files)
    return out


def soak(options: argparse.Namespace) -> list[str]:
    """One run in a temporary folder. What is wrong."""
    with tempfile.TemporaryDirectory(prefix="megastream-soak-") as name, EmbeddedServer(Path(name)) as server:
        model = write_checkpoint(Path(name) / "model", reveal.MOE, reveal.weights(0))
        settings = {"control_url": server.url, "run_id": "soak", "engine": "soak"}
        engine = Engine(model, additional_config={"megastream": settings}, **LAYOUTS[options.layout])
        try:
            run, orders = Soak(engine, server.url, options), Orders()
            with training(server.url, "soak", orders.train, CachedTrainer) as errors:
                try:
                    engine.run(run.run(orders), options.deadline_s)
                finally:
                    orders.end()
        finally:
            engine.close()
    wrong = run.wrong + errors
    CONSOLE.print(table(run.names, settled(run.samples), run.alone))
    if options.json:
        found = {"layout": options.layout, "tokens": run.traffic.totals, "wrong": wrong, "names": run.names}
        samples = {"samples": [asdict(one) for one in run.samples], "alone": [asdict(one) for one in run.alone]}
        options.json.write_text(json.dumps({**found, **samples}))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--layout", choices=LAYOUTS, default="pp2", help="of the engine")
    parser.add_argument("--every", type=int, default=50, help="updates between two samples")
    parser.add_argument("--kib-per-update", type=float, default=1.0, help="most that it may grow beyond that")
    parser.add_argument("--alone-s", type=float, default=180.0, help="with requests alone, behind the last update")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="for all updates")
    parser.add_argument("--json", type=Path, help="write every sample there")
    options = parser.parse_args()
    if options.updates < 10 * options.every:
        parser.error(f"--updates {options.updates} gives less than ten samples of --every {options.every}")
    wrong = soak(options)
    for line in wrong:
        CONSOLE.print(line, style="red")
    if not wrong:
        CONSOLE.print("nothing grew, nothing moved, no token was mixed or mislabelled")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
