"""Requests that are hard on an engine: four sequences of one prompt, prompts that come in chunks where a step has less
room than they need, requests that their clients give up, and more of all this than a small cache holds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from megastream.engine.vllm import compat, compat_front
from tests.helpers.engine import Answer, Engine

STREAMS = 5
SEQUENCES = 4


@asynccontextmanager
async def hard_traffic(engine: Engine) -> AsyncIterator[list[Answer]]:
    """Keeps `STREAMS` such requests in flight. Every sequence is an answer of its own.

    Yields the list that they go to; on the way out the last requests are waited for.
    """
    answers: list[Answer] = []
    done = asyncio.Event()
    gives_up = compat.version() >= (0, 32, 0)  # before, what a client aborts has no record

    async def stream(index: int) -> None:
        for number in itertools.count():
            if done.is_set():
                return
            prompt = [20 + (number + index) % 40] + [20] * (60 + (97 * number + 53 * index) % 270)
            length = 30 + (13 * number + 7 * index) % 90
            sequences = SEQUENCES if (number + index) % 2 else 1
            until = length * sequences // 2 if gives_up and (number + index) % 3 == 0 else None
            answers.extend(await ask_many(engine, f"h{index}-{number}", prompt, length, sequences, until))

    tasks = [asyncio.create_task(stream(index)) for index in range(STREAMS)]
    try:
        yield answers
    finally:
        done.set()
        await asyncio.gather(*tasks)


async def ask_many(
    engine: Engine, request_id: str, prompt: list[int], max_tokens: int, sequences: int, until: int | None
) -> list[Answer]:
    """Sampled, streamed; the weights leave sampling nothing to choose. Aborted once there are `until` tokens of it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        n=sequences,
        temperature=0.01,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    answers = [Answer() for _ in range(sequences)]
    async for output in engine.llm.generate({"prompt_token_ids": prompt}, parameters, request_id):
        for part in output.outputs:
            engine.num_tokens += len(part.token_ids)
            _take(answers[part.index], part, len(prompt))
        if until is not None and sum(len(answer.tokens) for answer in answers) >= until:
            until = None
            await engine.llm.abort(request_id)
    return answers


def _take(answer: Answer, part: Any, num_prompt: int) -> None:
    """A part of one sequence. On the last one is its record: about all tokens, and all that they attended to."""
    answer.tokens += part.token_ids
    if part.finish_reason is None:
        return
    answer.finish_reason, record = part.finish_reason, compat_front.record_of(part)
    assert record is not None, "a sequence without a record"
    spans = record["weight_versions"]
    answer.spans = [(span["version"], span["start"], span["end"]) for span in spans]
    answer.between = [(span["oldest"], span["newest"]) for span in spans if "oldest" in span]
    if part.finish_reason == "length":
        answer.kv = [(span["version"], span["start"], span["end"]) for span in record["kv_versions"]]
        starts, ends = [start for _, start, _ in answer.kv], [end for _, _, end in answer.kv]
        assert starts == [0, *ends[:-1]] and ends[-1] == num_prompt + len(answer.tokens) - 1, answer.kv
