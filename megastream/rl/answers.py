"""The engine's load: held-out questions, asked again and again by a fixed number of streams, without a break."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from megastream.rl.data import Pair, decode, prompt
from megastream.rl.job import LineLog

GIVEN_UP = ("error", "abort")
"""Finish reasons of answers that did not come to their end: refused by a poisoned engine, or aborted."""

ASK_AGAIN_S = 0.5


@dataclass
class Asked:
    """One question on its way: when it was asked and its tokens came, in unix seconds; `counts[i]` at `times[i]`."""

    request: str
    pair: Pair
    asked_unix_s: float = field(default_factory=time.time)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class Answering:
    """Keeps `streams` questions in flight until `stop`, and writes one line for every finished answer.

    An answer that the engine gave up is noted in `lost` and its question asked again.
    """

    def __init__(
        self, engine: AsyncLLM, pairs: list[Pair], lines: LineLog, lost: LineLog, *, answer_tokens: int, seed: int
    ) -> None:
        self._engine, self._pairs, self._lines, self._lost = engine, pairs, lines, lost
        self._answer_tokens, self._seed = answer_tokens, seed
        self._numbers = itertools.count()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._under_way = 0
        self.num_tokens = 0
        self.tokens_by_version: Counter[str] = Counter()
        """Tokens of finished answers, by the version that their spans name."""

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
        self._may_ask.set()
        await asyncio.gather(*self._tasks)

    @asynccontextmanager
    async def quiet(self, deadline_s: float) -> AsyncIterator[None]:
        """Within it no question is asked; it begins when the answers under way are done."""
        self._may_ask.clear()
        end = time.monotonic() + deadline_s
        try:
            while self._under_way:
                if time.monotonic() > end:
                    raise TimeoutError(f"the engine host waited {deadline_s:g} s for {self._under_way} answers to end")
                await asyncio.sleep(0.02)
            yield
        finally:
            self._may_ask.set()

    async def _stream(self) -> None:
        while not self._stopping:
            await self._may_ask.wait()
            number, attempt = next(self._numbers), 0
            pair = self._pairs[number % len(self._pairs)]
            self._under_way += 1
            try:
                while not await self._ask(Asked(f"q{number}.{attempt}", pair), number):
                    attempt += 1
                    await asyncio.sleep(ASK_AGAIN_S)
            finally:
                self._under_way -= 1

    async def _ask(self, asked: Asked, number: int) -> bool:
        """True when the question was answered; False when the engine gave it up."""
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
                return self._end(asked, output)
        return False

    def _end(self, asked: Asked, output: Any) -> bool:
        reason = output.outputs[0].finish_reason
        if reason in GIVEN_UP:
            self._lost.write(kind="lost", request=asked.request, reason=reason, tokens=len(asked.tokens))
            return False
        found = (output.kv_transfer_params or {}).get("weight_versions")
        if found is None:
            raise ValueError(f"answer {asked.request} came without version spans; is the megastream plugin loaded?")
        spans = [(span["version"], span["start"], span["end"]) for span in found]
        for version, start, end in spans:
            self.tokens_by_version[version] += end - start
        self._lines.write(
            request=asked.request,
            question=asked.pair.question,
            expected=asked.pair.answer,
            answer=decode(asked.tokens),
            tokens=len(asked.tokens),
            spans=spans,
            asked_unix_s=asked.asked_unix_s,
            times=asked.times,
            counts=asked.counts,
        )
        return True
