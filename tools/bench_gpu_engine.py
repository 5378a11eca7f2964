"""The engine of tools/bench_gpu.py: vLLM with random weights, requests that never end, and what they notice."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

PROMPT_TOKENS, STREAMS = 32, 64
GRAPHS = [1, 2, 4, 8, 16, 32, 64]
FIXED_PROMPTS, FIXED_TOKENS = 8, 24
_LAYER = re.compile(r"(model\.layers\.\d+)\.")


def start(model: Path, *, backend: str, plugin: dict[str, Any], kv_cache_gib: int, max_model_len: int) -> AsyncLLM:
    """vLLM on the first GPU that it sees, with CUDA graphs; blocks until it is up."""
    arguments = AsyncEngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        max_model_len=max_model_len,
        max_num_seqs=STREAMS,
        kv_cache_memory_bytes=kv_cache_gib << 30,
        enable_prefix_caching=False,
        disable_log_stats=True,
        compilation_config={"cudagraph_capture_sizes": GRAPHS},
        weight_transfer_config=WeightTransferConfig(backend=backend),
        additional_config={"megastream": plugin} if plugin else {},
    )
    return AsyncLLM.from_engine_args(arguments)


@dataclass
class Noticed:
    """What the requests of one stretch noticed. Milliseconds; `gap_ms` is the median of each request's longest gap.

    `p99_ms` leaves out as many of each request's longest steps as there were updates: those that met a commit.
    """

    what: str
    tokens_per_s: float = 0.0
    step_ms: float = 0.0
    p99_ms: float = 0.0
    gap_ms: float = 0.0
    longest_ms: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, what: str, stamps: list[list[float]], num_updates: int) -> Noticed:
        """`stamps`: when each request's tokens came. Rates are over the time in which all of them ran."""
        steps = [sorted(after - before for before, after in pairwise(each)) for each in stamps]
        longest = [each[-1] for each in steps]
        gaps = sorted(gap for each in steps for gap in each[: len(each) - num_updates])
        begin, end = max(each[0] for each in stamps), min(each[-1] for each in stamps)
        tokens = sum(begin < at <= end for each in stamps for at in each)
        return cls(
            what,
            tokens / (end - begin),
            1e3 * gaps[len(gaps) // 2],
            1e3 * gaps[int(0.99 * len(gaps))],
            1e3 * statistics.median(longest),
            1e3 * max(longest),
        )


class Requests:
    """Requests at one engine; `vocab` bounds the tokens of prompts."""

    def __init__(self, engine: AsyncLLM, vocab: int) -> None:
        self._engine, self._vocab, self._number = engine, vocab, 0

    async def run(self, what: str, num_tokens: int, during: Callable[[], Awaitable[Any]] | None = None) -> Noticed:
        """All streams at once, `num_tokens` each; `during` begins when each of them has 64."""
        stamps: list[list[float]] = [[] for _ in range(STREAMS)]
        with _no_collection():
            running = [asyncio.create_task(self._one(i, num_tokens, stamps[i])) for i in range(STREAMS)]
            facts = None
            if during is not None:
                while min(map(len, stamps)) < 64 and not any(task.done() for task in running):
                    await asyncio.sleep(0.002)
                facts = await during()
            await asyncio.gather(*running)
        facts = facts or {}
        noticed = Noticed.of(what, stamps, facts.get("updates", 0))
        noticed.facts = facts
        return noticed

    async def fixed(self) -> list[tuple[int, ...]]:
        """Greedy tokens of the same prompts, one after the other."""
        answers = []
        for index in range(FIXED_PROMPTS):
            tokens: list[int] = []
            async for output in self._ask(1000 + index, FIXED_TOKENS, 0.0):
                tokens += output.outputs[0].token_ids
            answers.append(tuple(tokens))
        return answers

    async def _one(self, index: int, num_tokens: int, stamps: list[float]) -> None:
        async for _ in self._ask(index, num_tokens, 1.0):
            stamps.append(time.perf_counter())

    def _ask(self, seed: int, num_tokens: int, temperature: float) -> Any:
        draw = random.Random(seed)
        prompt = [draw.randrange(10, self._vocab - 10) for _ in range(PROMPT_TOKENS)]
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._number += 1
        return self._engine.generate({"prompt_token_ids": prompt}, sampling, f"r{self._number}")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector stops this process for up to a second, and all requests would seem to stand still."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def update_stock(
    engine: AsyncLLM, about: dict[str, Any], send: Callable[[], Awaitable[Any]], packed: bool
) -> None:
    """vLLM's own update in its own pause, requests and their cache kept."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    fields = {key: about[key] for key in ("names", "dtype_names", "shapes")}
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.start_weight_update()
    sending = asyncio.ensure_future(send())
    await engine.update_weights(WeightTransferUpdateRequest(update_info={**fields, "packed": packed}))
    await sending
    await engine.finish_weight_update()
    await engine.resume_generation()


async def join_stock(engine: AsyncLLM, port: int, join: Callable[[], Awaitable[Any]]) -> None:
    """Engine and trainer make vLLM's group for updates."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    joining = asyncio.ensure_future(join())
    group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=group))
    await joining


async def call(engine: AsyncLLM, op: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's answer to one of megastream's calls."""
    reply: dict[str, Any] = (await engine.collective_rpc("megastream_call", args=(op, payload)))[0]
    if not reply["ok"]:
        raise RuntimeError(f"{op}: {reply['error']}")
    return reply


def sources_of(param: str, tensors: set[str], experts: int) -> list[list[str]]:
    """Which tensors of a Qwen3-MoE checkpoint vLLM's loader puts together to a parameter of one rank."""
    layer = match[1] if (match := _LAYER.match(param)) else ""
    if param.endswith("qkv_proj.weight"):
        return [[f"{layer}.self_attn.{each}_proj.weight" for each in "qkv"]]
    if param.endswith("w13_weight"):
        return [[f"{layer}.mlp.experts.{e}.{each}_proj.weight" for each in ("gate", "up")] for e in range(experts)]
    if param.endswith("w2_weight"):
        return [[f"{layer}.mlp.experts.{e}.down_proj.weight"] for e in range(experts)]
    if param not in tensors:
        raise ValueError(f"no tensor of the checkpoint is known to make the engine's {param}")
    return [[param]]
