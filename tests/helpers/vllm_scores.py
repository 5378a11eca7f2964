"""Stock vLLM on a folder: how likely it finds the tokens of a few fixed prompts. Nothing of megastream is asked for.

python -m tests.helpers.vllm_scores FOLDER     prints one JSON line: a list of log probabilities
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MARK = "SCORES "
PROMPTS = [[(first + 7 * step) % 320 for step in range(48)] for first in (3, 90, 200)]


def scores(folder: Path, deadline_s: float = 240) -> list[float]:
    """By a vLLM in a process of its own."""
    from tests.helpers.engine import ENVIRONMENT

    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", "tests.helpers.vllm_scores", str(folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=deadline_s, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    found: list[float] = json.loads(lines[-1].removeprefix(MARK))
    return found


def _main(folder: str) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, dtype="bfloat16", max_model_len=128, max_num_seqs=4, enforce_eager=True)
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)
    found = [
        chances[token].logprob
        for prompt, answer in zip(PROMPTS, answers, strict=True)
        for token, chances in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
    ]
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
