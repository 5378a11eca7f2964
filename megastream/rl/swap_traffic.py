"""Requests of the swap experiment, made live or replayed; every token with its time, logprob and label."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from megastream.rl.swap_figures import Answer
from megastream.rl.swap_replay import Arrival

_FIRST_TOKEN = 4
"""Below it are the special tokens of the tokenizers that we write; ordinary ones do for any model."""


def make_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random tokens. A prompt draws from few different ones, so that prompts differ in the experts that they use."""
    prompts = []
    for number in range(count):
        generator = np.random.default_rng((seed, number))
        own = generator.integers(min(_FIRST_TOKEN, vocab - 1), vocab, size=max(1, length // 8))
        prompts.append(generator.choice(own, length).tolist())
    return prompts


@dataclass
class Traffic:
    """The requests of one case, begun by `live` or `replay`. Call it in the event loop."""

    engine: AsyncLLM
    seed: int
    name: str
    num_tokens: int = 0
    answers: list[Answer] = field(default_factory=list)
    """Finished ones."""
    _stopping: bool = False
    _asked: asyncio.Future[list[None]] | None = None
    """Done behind the last answer, or with what ended a request."""

    def live(self, prompts: list[list[int]], requests: int, skew: float, answer_tokens: int) -> None:
        """Keeps `requests` in flight until `stop`, with prompts that are chosen anew each time."""
        weights = np.arange(1, len(prompts) + 1) ** -skew
        choice = np.random.default_rng((self.seed, requests))
        numbers = itertools.count()

        async def stream() -> None:
            while not self._stopping:
                number = next(numbers)
                prompt = prompts[int(choice.choice(len(prompts), p=weights / weights.sum()))]
                await self._ask(number, prompt, answer_tokens)

        self._asked = asyncio.gather(*(stream() for _ in range(requests)))

    def replay(self, arrivals: Sequence[Arrival], speed: float) -> None:
        """Asks each of them once, at its time divided by `speed`, whether or not others have been answered."""
        begin_s = time.monotonic()

        async def arrive(number: int, arrival: Arrival) -> None:
            await asyncio.sleep(begin_s + arrival.at_s / speed - time.monotonic())
            await self._ask(number, arrival.prompt, arrival.answer_tokens)

        self._asked = asyncio.gather(*(arrive(*one) for one in enumerate(arrivals)))

    async def wait_for(self, tokens: int, deadline_s: float) -> None:
        """Until so many more tokens have come. TimeoutError; ValueError behind the last request of a replay; and what
        ended a request."""
        assert self._asked is not None, "no traffic before live or replay"
        until, enough = time.monotonic() + deadline_s, self.num_tokens + tokens
        while self.num_tokens < enough:
            if self._asked.done():
                self._asked.result()
                raise ValueError(
                    f"the last request was answered {enough - self.num_tokens} tokens before the next swap was due; "
                    "record more, or lower swap.swaps, swap.tokens_between or swap.emission_s"
                )
            if time.monotonic() > until:
                raise TimeoutError(f"{tokens} tokens did not come within {deadline_s:g} s")
            await asyncio.sleep(0.002)

    async def stop(self) -> None:
        """Lets the answers under way come to their end, and a replay to its own."""
        assert self._asked is not None, "no traffic before live or replay"
        self._stopping = True
        await self._asked

    async def _ask(self, number: int, prompt: str | Sequence[int], answer_tokens: int) -> None:
        request = f"{self.name}-{number}"
        sampling = SamplingParams(
            temperature=1.0,
            seed=self.seed + number,
            max_tokens=answer_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        asked = prompt if isinstance(prompt, str) else TokensPrompt(prompt_token_ids=[*prompt])
        tokens: list[int] = []
        logprobs: list[float] = []
        times_s = [time.monotonic()]
        output: Any = None
        async for output in self.engine.generate(asked, sampling, request):
            part = output.outputs[0]
            if new := list(part.token_ids):
                tokens += new
                logprobs += [top[token].logprob for token, top in zip(new, part.logprobs, strict=True)]
                times_s.append(time.monotonic())
                self.num_tokens += len(new)
        if len(tokens) != answer_tokens:
            raise ValueError(
                f"request {request} was answered with {len(tokens)} tokens of {answer_tokens}; "
                "engine.max_model_len has no room for prompt and answer"
            )
        spans = (output.kv_transfer_params or {}).get("weight_versions")
        labels = _labels(request, spans, len(tokens))
        self.answers.append(Answer(output.prompt_token_ids, tuple(tokens), tuple(logprobs), tuple(times_s), labels))


def _labels(request: str, spans: Any, count: int) -> tuple[str, ...]:
    if spans is None:
        raise ValueError(f"answer {request} came without version spans; is the megastream plugin loaded?")
    labels = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    if len(labels) != count:
        raise ValueError(f"answer {request} has {count} tokens, its spans {len(labels)}")
    return tuple(labels)


async def rescore(engine: AsyncLLM, answers: list[Answer], name: str) -> list[tuple[float, ...]]:
    """The logprobs of the same tokens, computed anew by what is live now: each answer is read as a prompt."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    found = []
    for number, answer in enumerate(answers):
        whole = [*answer.prompt, *answer.tokens]
        prompt = TokensPrompt(prompt_token_ids=whole)
        async for output in engine.generate(prompt, sampling, f"{name}-{number}"):
            behind = list(zip(whole, output.prompt_logprobs, strict=True))[len(answer.prompt) :]
            logprobs = tuple(top[token].logprob for token, top in behind)
        found.append(logprobs)
    return found
