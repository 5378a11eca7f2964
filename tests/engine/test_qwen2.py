"""Qwen2-MoE on a real engine: biases, shared experts and their gates are streamed, and are what a cold start has."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megastream.engine.digest import tensor_digest
from megastream.families import family_of, load_shape
from megastream.trainer.config import TrainerConfig
from tests.engine.conftest import LAYOUTS
from tests.helpers.cut import cut
from tests.helpers.engine import Answer, Engine, Server
from tests.helpers.reveal_trainer import Orders, RevealTrainer, training
from tests.helpers.tiny import hf_config, hf_shapes
from tests.helpers.tiny_moe import TinyMoe, Weights, write_tokenizer

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

CONFIG = TrainerConfig(
    layers=4,
    hidden=128,
    heads=4,
    kv_groups=2,
    head_dim=32,
    experts=8,
    top_k=2,
    expert_ffn=32,
    vocab=320,
    max_sequence=512,
    qk_norm=False,
    qkv_bias=True,
    norm_top_k=False,
    shared_ffn=96,
)
PROMPT = [31, 7, 250, 99, 3, 120]


def qwen2_weights(version: int) -> Weights:
    """Every tensor differs between versions."""
    weights = {}
    for name, shape in hf_shapes(CONFIG).items():
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{version} {name}".encode())))
        value = (
            1 + 0.1 * noise if "norm" in name else noise * (1.0 if "embed" in name or "gate.weight" in name else 0.1)
        )
        weights[name] = value.to(torch.bfloat16)
    return weights


class Qwen2Trainer(RevealTrainer):
    """Its versions 0 to 3 have weights A, B, C and B again."""

    shape = load_shape(hf_config(CONFIG))
    family = family_of(shape)
    weights = staticmethod(lambda version: qwen2_weights((0, 1, 2, 1)[version]))


def write(folder: Path, seed: int) -> Path:
    """A folder that `vllm serve` takes."""
    folder.mkdir()
    save_file(qwen2_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**hf_config(CONFIG), "max_position_embeddings": 2048}))
    write_tokenizer(folder, CONFIG.vocab)
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def qwen2(
    request: pytest.FixtureRequest, control_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    name = f"qwen2-{request.param}"
    model = write(tmp_path_factory.mktemp("qwen2") / "model", 0)
    settings = {"control_url": control_url, "run_id": name, "engine": name}
    engine = Engine(model, additional_config={"megastream": settings}, **LAYOUTS[request.param])
    engine.name = request.param
    try:
        yield engine
    finally:
        engine.close()


def test_streamed_weights_are_those_of_a_cold_start(qwen2: Engine, control_url: str, tmp_path: Path) -> None:
    """A is compared at attach byte for byte, B with a slow cut on every rank, and with the answers of a cold start."""
    orders = Orders()

    async def run() -> list[Answer]:
        answers = [await qwen2.ask("v0", PROMPT, 12)]
        with training(control_url, f"qwen2-{qwen2.name}", orders.train, Qwen2Trainer) as errors:
            try:
                for version in (1, 2, 3):
                    await asyncio.to_thread(orders.update, version)
                    answers.append(await qwen2.ask(f"v{version}", PROMPT, 12))
            finally:
                orders.end()
        assert errors == []
        assert await _differing(qwen2, qwen2_weights(1)) == []
        assert len(await _differing(qwen2, qwen2_weights(2))) > 30
        return answers

    answers = qwen2.run(run(), timeout_s=300)
    assert [answer.labels() for answer in answers] == [[str(version)] * 12 for version in range(4)]
    said = [(answer.tokens, answer.logprobs) for answer in answers]
    assert said[1] == said[3]
    assert len({str(each) for each in said}) == 3
    if qwen2.name == "tp2ep":
        return  # tensor parallel sums are rounded in another order than a single worker's
    with Server(write(tmp_path / "model", 1)) as server:
        request = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        choice = server.post("/v1/completions", {**request, "return_token_ids": True})["choices"][0]
    assert (choice["token_ids"], choice["logprobs"]["token_logprobs"]) == said[3]


async def _differing(engine: Engine, weights: Weights) -> list[str]:
    """Live buffers of all ranks that are not what vLLM's loader would make of these weights."""
    live = await engine.ranks("megastream_call", "digest", {})
    inventories = await engine.ranks("megastream_call", "inventory", {})
    out = []
    for rank, (reply, inventory) in enumerate(zip(live, inventories, strict=True)):
        # vLLM's small CPU linears keep their bias in fp32.
        wide = {each["name"] for each in inventory["parameters"] if each["item_bytes"] == 4}
        layout: dict[str, Any] = dict(tp=0, tp_size=1, expert_parallel=False)
        if engine.name == "tp2ep":
            layout = dict(tp=rank, tp_size=2, expert_parallel=True)
        expected = cut(weights, TinyMoe(experts=CONFIG.experts), reply["digests"], **layout)
        names = [
            n
            for n in expected
            if tensor_digest(expected[n].float() if n in wide else expected[n]) != reply["digests"][n]
        ]
        assert any(name.endswith(("qkv_proj.bias", "shared_expert_gate.weight")) for name in expected)
        out += names
    return out
