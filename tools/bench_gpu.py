"""Updates of a running vLLM on GPUs: streamed, and by vLLM's own pause and reload, for one trainer rank and one engine.

    python -m tools.bench_gpu --out FOLDER [--size 30B-A3B] [--transport ipc] [--piece-mib 128] [--updates 3]

The trainer (Megatron's parameter buffers with random weights, no gradients, no optimizer) has the first GPU, vLLM the
second; with one GPU they share it. Two engines follow each other on one machine, with the same weights at the change:
with megastream, then stock with packed NCCL (needs two GPUs). 64 requests decode all the time. The gap of an update is
the median over the requests of each one's longest time without a token, minus the median step of the stretches without
an update.

`lane`: all bytes of a version, from final in Megatron's buffers to written into staging and acknowledged, packing and
checksums included. `commit`: the copies on the device, as CUDA events see them. Raw rates are copies of 4 GiB in the
same run. Live parameters are compared with the trainer's tensors, digests of every byte (of a few layers for large
models); fixed prompts give the tokens that they give behind a stock update to the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from megastream.control.embedded import EmbeddedServer
from tools import bench_gpu_trainer
from tools.bench_gpu_table import CONSOLE, STOCK, line, print_summary, summary

SHIPPED = "Qwen3-30B-A3B"
SIZES: dict[str, dict[str, int]] = {
    "30B-A3B": {},
    "7B-A1B": {"num_hidden_layers": 16, "num_attention_heads": 16, "num_experts": 64, "moe_intermediate_size": 1024},
    "1B": {
        "num_hidden_layers": 16,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "intermediate_size": 1536,
    },
}
LATER = {"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False}
GAP_TOKENS, LOAD_TOKENS = 320, 1200
LOAD_S, EVERY_S = 16.0, 2.0
CHECKED_LAYERS = (0, -1)


def write_model(size: str, folder: Path) -> dict[str, Any]:
    """config.json of a Qwen3-MoE of this size; its numbers."""
    shipped = json.loads(files("megastream.families").joinpath(f"models/{SHIPPED}.json").read_text())["config"]
    config: dict[str, Any] = {**shipped, **LATER, **SIZES[size]}
    (folder / "config.json").write_text(json.dumps(config))
    return config


class TrainerProcess:
    """The trainer, asked from here. One order at a time."""

    def __init__(self, model: Path, bucket_elements: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=bench_gpu_trainer.serve, args=(theirs, str(model), bucket_elements))
        self._process.start()
        theirs.close()
        self._answer()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Blocks. RuntimeError with what the trainer says."""
        self._pipe.send((name, arguments))
        return self._answer()

    async def order(self, name: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self.ask, name, *arguments)

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join(20)
        self._process.kill()

    def _answer(self) -> Any:
        limit_s = bench_gpu_trainer.DEADLINE_S + 100
        if not self._pipe.poll(limit_s):
            raise RuntimeError(f"the trainer did not answer for {limit_s:g} s")
        good, answer = self._pipe.recv()
        if not good:
            raise RuntimeError(f"trainer: {answer}")
        return answer


class Bench:
    """One size. `rows` are what was noticed, `facts` everything else."""

    def __init__(self, options: argparse.Namespace, config: dict[str, Any], model: Path, gpus: int) -> None:
        self.options, self.config, self.model = options, config, model
        self.trainer = TrainerProcess(model, options.bucket_elements)
        self.engine_index = min(1, gpus - 1)
        self.about = self.trainer.ask("about")
        self.rows: list[Any] = []
        self.facts: dict[str, Any] = {"bytes": self.about["bytes"], "tensors": self.about["tensors"]}
        self.facts["raw"] = self.trainer.ask("raw", self.engine_index)
        self.answers: dict[str, Any] = {}
        self.seed = 1

    async def ours(self, url: str) -> None:
        from tools import bench_gpu_engine as on_engine

        settings = {"staging_sets": 1}
        plugin = {"control_url": url, "run_id": "bench", "engine": "e", "transport": self.options.transport}
        engine = self._start("megastream", {**plugin, "records": True, "settings": settings})
        try:
            requests = on_engine.Requests(engine, self.config["vocab_size"])
            await requests.run("warm", 96)
            options = self.options
            piece_bytes = int(options.piece_mib * 2**20)
            attach = ("attach", url, piece_bytes, options.slots, options.experts_per_unit)
            self._note("attach_s", await self.trainer.order(*attach))
            self._note("idle", [await self._update_ours() for _ in range(2)])
            await self._stretches(requests, "megastream", self._update_ours)
            await self._load(requests)
            self._note("differing", await self._differing(engine))
            self.answers["megastream"] = await requests.fixed()
            records = await engine.engine_core.call_utility_async("megastream_records")
            self._note("commits", [commit for rank in records["commits"] for commit in rank])
            await self.trainer.order("detach")
        finally:
            engine.shutdown()

    async def stock(self) -> None:
        from tools import bench_gpu_engine as on_engine

        engine = self._start("nccl", {})
        try:
            requests = on_engine.Requests(engine, self.config["vocab_size"])
            await requests.run("warm", 96)
            port = _free_port()
            await on_engine.join_stock(engine, port, functools.partial(self.trainer.order, "join_stock", port))
            send = functools.partial(self.trainer.order, "send_stock", True)

            async def update() -> dict[str, Any]:
                begin = time.monotonic()
                await on_engine.update_stock(engine, self.about, send, packed=True)
                return {"live_s": time.monotonic() - begin, "updates": 1}

            await update()  # the weights of the last streamed version, and everything once before it is timed
            self.answers["stock"] = await requests.fixed()
            await self._stretches(requests, STOCK, update)
        finally:
            engine.shutdown()

    async def _stretches(self, requests: Any, what: str, update: Any) -> None:
        """Without and with an update, in turns; new weights before each."""
        for _ in range(self.options.updates):
            self.rows.append(await requests.run(f"{what}: none", GAP_TOKENS))
            await self._new_weights()
            self.rows.append(await requests.run(f"{what}: one", GAP_TOKENS, update))
            CONSOLE.print(line(self.rows[-2]), line(self.rows[-1]), sep="\n")

    async def _new_weights(self) -> None:
        self.seed += 1
        await self.trainer.order("fill", self.seed)

    async def _update_ours(self) -> dict[str, Any]:
        update: dict[str, Any] = await self.trainer.order("update")
        return {**update, "updates": 1}

    async def _load(self, requests: Any) -> None:
        """The same long requests, without updates and with one every EVERY_S."""
        step_s = self.rows[-2].step_ms / 1e3
        num_tokens = min(LOAD_TOKENS, int(LOAD_S / step_s))
        updates_s = num_tokens * step_s - EVERY_S

        async def often() -> dict[str, Any]:
            begin, count = time.monotonic(), 0
            while time.monotonic() - begin < updates_s:
                due = time.monotonic() + EVERY_S
                await self.trainer.order("update")
                count += 1
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
            return {"updates": count}

        for what, during in (("none, long", None), (f"every {EVERY_S:g} s, long", often)):
            self.rows.append(await requests.run(f"megastream: {what}", num_tokens, during))
            CONSOLE.print(line(self.rows[-1]))

    async def _differing(self, engine: Any) -> dict[str, Any]:
        """Live parameters whose bytes are not the trainer's."""
        from tools import bench_gpu_engine as on_engine

        inventory = (await on_engine.call(engine, "inventory", {}))["parameters"]
        self.facts["floor"] = sum((e["elements"] - e["padding"]) * e["item_bytes"] for e in inventory if e["used"])
        layers = {f".{i % self.config['num_hidden_layers']}." for i in CHECKED_LAYERS}
        every = self.about["bytes"] < 20e9
        all_names = [each["name"] for each in inventory]
        names = [n for n in all_names if every or ".layers." not in n or any(layer in n for layer in layers)]
        sources = {n: on_engine.sources_of(n, set(self.about["names"]), self.config["num_experts"]) for n in names}
        expected = await self.trainer.order("digests", sources)
        found = (await on_engine.call(engine, "digest", {"names": names}))["digests"]
        differing = [name for name in names if found[name] != expected[name]]
        return {"checked": len(names), "of": len(inventory), "differing": differing}

    def _start(self, backend: str, plugin: dict[str, Any]) -> Any:
        from tools import bench_gpu_engine as on_engine

        begin = time.monotonic()
        with _visible(self.engine_index):
            engine = on_engine.start(
                self.model, backend=backend, plugin=plugin, kv_cache_gib=self.options.kv_gib, max_model_len=2048
            )
        self._note(f"start_{backend}_s", time.monotonic() - begin)
        return engine

    def _note(self, what: str, value: Any) -> None:
        self.facts[what] = value
        CONSOLE.print(what, value if not isinstance(value, list) else value[-3:])


@contextmanager
def _visible(first: int) -> Iterator[None]:
    """The engine's process sees this GPU first, and the trainer's behind it."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "1,0" if first else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


async def run(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        config = write_model(options.size, Path(folder))
        bench = Bench(options, config, Path(folder), torch.cuda.device_count())
        try:
            with EmbeddedServer(Path(folder) / "control") as server:
                await bench.ours(server.url)
            if bench.engine_index and not options.no_stock:
                await bench.stock()
        finally:
            bench.trainer.close()
            figures = summary(bench.rows, bench.facts, bench.answers)
            rows = [asdict(row) for row in bench.rows]
            text = json.dumps({"size": options.size, "figures": figures, "facts": bench.facts, "rows": rows}, indent=1)
            (out / f"{options.size}-{options.transport}.json").write_text(text)
    print_summary(options.size, figures, bench.facts["raw"])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures as JSON")
    parser.add_argument("--size", choices=SIZES, default="30B-A3B")
    parser.add_argument("--transport", choices=("ipc", "nccl", "gloo"), default="ipc")
    parser.add_argument("--piece-mib", type=float, default=128.0)
    parser.add_argument("--bucket-elements", type=int, default=200_000_000, help="size at which Megatron ends a bucket")
    parser.add_argument("--experts-per-unit", type=int, default=32, help="experts that become final together")
    parser.add_argument("--slots", type=int, default=8, help="packed pieces that wait for their acknowledgement")
    parser.add_argument("--updates", type=int, default=3, help="timed updates, each beside a stretch without one")
    parser.add_argument("--kv-gib", type=int, default=8)
    parser.add_argument("--no-stock", action="store_true", help="leave vLLM's own update out")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(options, options.out))


if __name__ == "__main__":
    main()
