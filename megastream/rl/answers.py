"""The engine's load: held-out questions, asked again and again by a fixed number of streams, without a break."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from megastream.rl.data import Pair, decode, prompt
from megastream.rl.job import LineLog


@dataclass
class Asked:
    """One question on its way: when its tokens came, in unix seconds, `counts[i]` of them at `times[i]`."""

    request: str
    pair: Pair
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class Answering:
    """Keeps `streams` questions in flight until `stop`, and writes one line for every finished answer."""

    def __init__(self, engine: AsyncLLM, pairs: list[Pair], lines: LineLog, *, answer_tokens: int, seed: int) -> None:
        self._engine, self._pairs, self._lines = engine, pairs, lines
        self._answer_tokens, self._seed = answer_tokens, seed
        self._numbers = itertools.count()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self.num_tokens = 0

    def start(self, streams: int) -> None:
        """Begins to ask. Call it in the event loop."""
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(streams)]

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """They end only after `stop`, or with an error."""
        return self._tasks

    async def stop(self) -> None:
        """Lets the answers under way come to their end, and returns then."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _stream(self) -> None:
        while not self._stopping:
            number = next(self._numbers)
            await self._ask(Asked(f"q{number}", self._pairs[number % len(self._pairs)]), number)

    async def _ask(self, asked: Asked, number: int) -> None:
        sampling = SamplingParams(
            temperature=1.0,
            seed=self._seed + number,
            max_tokens=self._answer_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        question = TokensPrompt(prompt_token_ids=prompt(asked.pair.question))
        async for output in self._engine.generate(question, sampling, asked.request):
            new = list(output.outputs[0].token_ids)
            if new:
                asked.tokens += new
                asked.times.append(time.time())
                asked.counts.append(len(new))
                self.num_tokens += len(new)
            if output.finished:
                self._write(asked, output)

    def _write(self, asked: Asked, output: Any) -> None:
        spans = (output.kv_transfer_params or {})["weight_versions"]
        self._lines.write(
            request=asked.request,
            question=asked.pair.question,
            expected=asked.pair.answer,
            answer=decode(asked.tokens),
            tokens=len(asked.tokens),
            spans=[(span["version"], span["start"], span["end"]) for span in spans],
            times=asked.times,
            counts=asked.counts,
        )
