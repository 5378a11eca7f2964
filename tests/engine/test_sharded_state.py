"""Real vLLM loads what was converted with its own `ShardedStateLoader`, and answers as after its own load.

That loader refuses a parameter that is missing and one that it does not know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import TWO_RANKS
from tests.helpers.convert_models import converted, tensors_of
from tests.helpers.engine import Engine
from tests.helpers.tiny_moe import TinyMoe, random_weights, write_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

LAYOUTS = {"pp2": "pp2", "tp2ep": "tp2 ep2"}
PROMPTS = [list(range(first, first + 24)) for first in (3, 90, 200)]


def answers(folder: Path, control_url: str, name: str, **extra: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens with their logprobs, from an engine of its own."""
    settings = {"control_url": control_url, "run_id": name, "engine": name}
    engine = Engine(folder, additional_config={"megastream": settings}, **extra)
    try:
        asked = [engine.run(engine.ask(f"{name} {n}", prompt, 24), 200) for n, prompt in enumerate(PROMPTS)]
        return [(answer.tokens, answer.logprobs) for answer in asked]
    finally:
        engine.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_answers_as_after_its_own_load(tmp_path: Path, control_url: str, layout: str) -> None:
    moe = TinyMoe()
    source = write_checkpoint(tmp_path / "hf", moe, random_weights(moe, 1))
    state = converted(source, tmp_path / "state", "sharded_state", to_layout=LAYOUTS[layout], max_file_bytes=200_000)
    assert len(list(state.glob("*.safetensors"))) >= 4
    loaded = answers(state, control_url, f"state-{layout}", load_format="sharded_state", **TWO_RANKS[layout])
    expected = answers(source, control_url, f"hf-{layout}", **TWO_RANKS[layout])
    assert len({token for tokens, _ in expected for token in tokens}) > 5
    assert loaded == expected
    back = converted(state, tmp_path / "back")
    assert all(tensor.equal(tensors_of(source)[name]) for name, tensor in tensors_of(back).items())
