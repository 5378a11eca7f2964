"""Fixed prompts, answered greedily with logprobs: what a fresh engine on the same weights must repeat exactly."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from megastream.rl.data import Pair, prompt

NUM_PROMPTS = 8
NUM_TOKENS = 16
NUM_LOGPROBS = 5


async def ask_fixed(engine: AsyncLLM, pairs: list[Pair]) -> list[dict[str, Any]]:
    """One prompt after the other, in an engine that does nothing else, so that batches are the same each time.

    Returns each question's tokens and, for each of them, (token, logprob) of the likeliest ones.
    """
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=NUM_LOGPROBS,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    answers = []
    for number, pair in enumerate(pairs[:NUM_PROMPTS]):
        question = TokensPrompt(prompt_token_ids=prompt(pair.question))
        async for output in engine.generate(question, sampling, f"fixed-{number}"):
            answer = output.outputs[0]
            logprobs = [sorted((token, lp.logprob) for token, lp in at.items()) for at in answer.logprobs or []]
            answers.append({"question": pair.question, "tokens": list(answer.token_ids), "logprobs": logprobs})
    return answers
