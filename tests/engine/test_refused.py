"""Engines that serve and cannot be streamed to: a trainer that attaches is told why, and they serve on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megastream.families import family_of, load_shape
from megastream.layout.mesh import parse_trainer_mesh
from tests.helpers.engine import Engine
from tests.helpers.family_models import random_transformers
from tests.helpers.reveal_trainer import RevealTrainer, training
from tests.helpers.tiny_moe import TinyMoe, random_weights, write_checkpoint, write_tokenizer

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

VOCAB = 320
DELTA = dict(num_hidden_layers=4, hidden_size=64, intermediate_size=128, moe_intermediate_size=128, vocab_size=VOCAB)
DELTA |= dict(head_dim=64, shared_expert_intermediate_size=64, max_position_embeddings=2048)
DELTA |= dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=128, linear_value_head_dim=128)
TIED = TinyMoe(vocab=VOCAB, tied=True)


def delta(folder: Path) -> None:
    random_transformers("qwen3_next", 0, **DELTA).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, VOCAB)


def tied(folder: Path) -> None:
    write_checkpoint(folder, TIED, random_weights(TIED, 0))


def plain(folder: Path) -> None:
    model = TinyMoe(vocab=VOCAB)
    write_checkpoint(folder, model, random_weights(model, 0))


DRAFT = {"method": "draft_model", "num_speculative_tokens": 2}
"""The served model drafts for itself."""
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "a draft model": (
        plain,
        {"speculative_config": DRAFT},
        {},
        "a draft model is in use; leave out",
    ),
    "recurrent states of delta nets": (delta, {}, {}, "requests have recurrent states"),
    "tied over stages": (tied, {"pipeline_parallel_size": 2}, {}, "embedding and head are tied across pipeline stages"),
    "a gate in parts without room": (
        plain,
        {"pipeline_parallel_size": 2},
        {"gate": "stage", "settings": {"staging": {"device_bytes": 4096, "host_bytes": 4096}}},
        "; raise staging.host_bytes by ",
    ),
}
"""What is served, how (vLLM's arguments, then ours), and what a trainer is told. EPLB does not start on a CPU."""


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_is_told_why_and_the_engine_serves_on(case: str, control_url: str, tmp_path: Path) -> None:
    write, layout, given, words = CASES[case]
    folder, run = tmp_path / "model", f"refused-{len(case)}"
    write(folder)
    if "speculative_config" in layout:
        layout = {"speculative_config": {**DRAFT, "model": str(folder)}}

    class Trainer(RevealTrainer):
        shape = load_shape(folder)
        family = family_of(shape)
        mesh = parse_trainer_mesh("tp1 pp2 ep2")

        def fill(self, version: int) -> None:
            """It is refused before a byte of it is needed."""

    settings = {"megastream": {"control_url": control_url, "run_id": run, "engine": "e", **given}}
    engine = Engine(folder, additional_config=settings, **layout)
    try:
        before = engine.run(engine.ask("before", [31, 7, 50, 99], 8))
        with training(control_url, run, lambda sync, trainer: sync.attach(), kind=Trainer) as errors:
            pass
        after = engine.run(engine.ask("after", [31, 7, 50, 99], 8, cold=True))
    finally:
        engine.close()
    assert len(errors) == 4 and all(words in error for error in errors), errors
    assert before.tokens == after.tokens and after.labels() == ["0"] * 8
