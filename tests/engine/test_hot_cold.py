"""A hot update equals a cold start, for the families that an engine on a CPU serves: A, B, C and B again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megastream.engine.vllm.metrics import RANK_METRICS, Figures
from megastream.families import family_of, load_shape
from megastream.layout.mesh import parse_trainer_mesh
from tests.engine.conftest import LAYOUTS, NUM_GPUS
from tests.helpers.engine import Answer, Engine
from tests.helpers.family_models import random_transformers
from tests.helpers.reveal_trainer import Orders, RevealTrainer, training
from tests.helpers.tiny_moe import write_tokenizer

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

PROMPT = [31, 7, 50, 99, 3, 20]
VERSIONS = ("a", "b", "c", "b")
COMMON = dict(num_hidden_layers=4, hidden_size=64, intermediate_size=128, head_dim=32, num_key_value_heads=2)
COMMON |= dict(max_position_embeddings=2048, vocab_size=320)
MOE = dict(COMMON, moe_intermediate_size=64)
YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=2.0, original_max_position_embeddings=1024, truncate=False)
YARN |= dict(beta_fast=32.0, beta_slow=1.0)
LATENT = dict(head_dim=64, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32)
LATENT |= dict(num_key_value_heads=4, moe_intermediate_size=128)
"""The latent's two widths are the only ones that vLLM has CPU kernels for."""
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(MOE, num_experts=8),
    "mixtral": dict(COMMON, num_local_experts=8),
    "glm4_moe": MOE,
    "qwen2_moe": dict(MOE, hidden_size=128, num_experts=8, shared_expert_intermediate_size=96, norm_topk_prob=False),
    "gpt_oss": dict(COMMON, num_local_experts=8, rope_parameters=YARN),
    "deepseek_v2": MOE | LATENT,
    "deepseek_v3": MOE | LATENT | {"topk_method": "noaux_tc"},
    "qwen3": COMMON,
    "llama": COMMON,
}
"""All but Qwen3-Next, which is refused by name."""
WITHOUT_EXPERTS = ("qwen3", "llama")
"""vLLM refuses expert parallelism for them."""


def in_turn(number: int) -> str:
    """One of the layouts: a case of all of them takes three minutes, and Qwen3-MoE's are there in each."""
    return list(LAYOUTS)[number % len(LAYOUTS)]


CASES = [("qwen3_moe", layout, "") for layout in LAYOUTS]
CASES += [(f, in_turn(n), "") for n, f in enumerate(SIZES) if f not in ("qwen3_moe", *WITHOUT_EXPERTS)]
CASES += [(f, "pp2", "") for f in WITHOUT_EXPERTS if "pp2" in LAYOUTS]
BUDGETS: dict[str, dict[str, int]] = {
    "host": {"device_bytes": 0},
    "split": {"device_bytes": 400_000},
    "pull": {"device_bytes": 400_000, "host_bytes": 0},
    "none": {"device_bytes": 0, "host_bytes": 0},
}
"""Of staging: nothing on the device; as much of it as leaves experts to host memory, or to the trainer; nothing."""
CASES += [("qwen3_moe", in_turn(n), budget) for n, budget in enumerate(BUDGETS)]
IN_TURNS = "in turns"
"""Experts lie on the ranks in turns, which vLLM does for models with groups of experts alone."""
CASES += [("glm4_moe", layout, IN_TURNS) for layout in LAYOUTS if layout == "tp2ep"]
GROUPS = dict(n_routed_experts=8, n_group=2, topk_group=1)
CASES += [("deepseek_v3", "pp2", budget) for budget in ("host", "none") if "pp2" in LAYOUTS]
PLAIN_KERNEL = "plain kernel"
"""Latent attention that AMX does not compute: absorbed matrices are views of a weight, as on a GPU."""
CASES += [("deepseek_v3", layout, PLAIN_KERNEL) for layout in LAYOUTS if not NUM_GPUS]
SERVED = {
    IN_TURNS: {"expert_placement_strategy": "round_robin"},
    PLAIN_KERNEL: {"attention_config": {"backend": "CPU_MLA"}},
}
RELOADED = ("deepseek_v2", "deepseek_v3")
"""Families of which vLLM's own reload is looked at, too: what is derived from weights is made anew there."""


def write(family: str, folder: Path, **more: int) -> dict[str, Path]:
    """A folder that vLLM serves for each of A, B and C; no two tensors of them are alike."""
    folders = {}
    for seed, name in enumerate("abc"):
        folders[name] = folder / name
        random_transformers(family, seed, **SIZES[family] | more).to(torch.bfloat16).save_pretrained(folders[name])
        write_tokenizer(folders[name], SIZES[family]["vocab_size"])
    return folders


def trainer_of(folders: dict[str, Path]) -> type[RevealTrainer]:
    """A trainer whose versions 0 to 3 have the weights A, B, C and B."""
    model = load_shape(folders["a"])
    specs = {spec.name: spec.shape for spec in family_of(model).tensors(model)}

    def read(folder: Path) -> dict[str, torch.Tensor]:
        """Of GPT-OSS a file has gate and up in one dim, in turns."""
        return {name: t.view(specs.get(name, t.shape)) for name, t in load_file(folder / "model.safetensors").items()}

    held = {name: read(folder) for name, folder in folders.items()}

    class Trainer(RevealTrainer):
        shape = model
        family = family_of(shape)
        mesh = parse_trainer_mesh("tp1 pp2 ep2" if shape.num_experts else "tp2 pp2")
        weights = staticmethod(lambda version: held[VERSIONS[version]])

    return Trainer


async def look(engine: Engine, name: str) -> tuple[Any, Any, Any, Any]:
    """What a version is: digests of all parameters that each rank computes with, logprobs and tokens of a prefill and
    decodes, digests of all other tensors of the model."""
    answer: Answer = await engine.ask(name, PROMPT, 12)
    ranks = await engine.ranks("megastream_call", "digest", {})
    assert all(rank["ok"] for rank in ranks), ranks
    return [rank["digests"] for rank in ranks], answer.logprobs, answer.tokens, await engine.ranks("feed_tensors")


def check_staging(budget: str) -> None:
    """What /metrics says of it: where it lies on each rank, and the KV blocks that it is as large as."""
    names = [metric.name for metric in RANK_METRICS]
    ranks = [dict(zip(names, row)) for rank, row in Figures().rows().items() if rank >= 0]  # noqa: B905
    assert len(ranks) == 2
    for rank in ranks:
        on_device, on_host = rank["staging_device_bytes"], rank["staging_host_bytes"]
        assert bool(on_host) == (budget in ("host", "split")) and on_device <= BUDGETS[budget]["device_bytes"]
        assert bool(on_device) == (budget in ("split", "pull")) and bool(rank["staging_kv_blocks"]) <= bool(on_device)


def check_turns(engine: Engine) -> None:
    """Each rank has every other expert, in every layer that has any."""
    for rank, maps in enumerate(engine.run(engine.ranks("feed_expert_maps"))):
        expected = [slot // 2 if slot % 2 == rank else -1 for slot in range(GROUPS["n_routed_experts"])]
        assert maps and all(each == expected for each in maps), maps


@pytest.mark.parametrize(("family", "layout", "variant"), CASES)
def test_streamed_weights_are_those_of_a_cold_start(
    family: str, layout: str, variant: str, control_url: str, tmp_path: Path
) -> None:
    """Every tensor that each rank holds, and every answer, is that of a fresh engine served from B's folder."""
    folders = write(family, tmp_path, **(GROUPS if variant == IN_TURNS else {}))
    run_id = f"hot-{family}-{layout}-{variant.replace(' ', '-')}"
    ours: dict[str, Any] = {"control_url": control_url, "run_id": run_id, "engine": run_id}
    settings = {"megastream": {**ours, "settings": {"staging": BUDGETS[variant]} if variant in BUDGETS else {}}}
    how: dict[str, Any] = {**LAYOUTS[layout], **SERVED.get(variant, {})}
    engine = Engine(folders["a"], additional_config=settings, **how)
    orders = Orders()

    async def stream() -> list[Any]:
        seen, places = [await look(engine, "v0")], await engine.ranks("feed_places")
        with training(control_url, run_id, orders.train, trainer_of(folders)) as errors:
            try:
                for version in (1, 2, 3):
                    await asyncio.to_thread(orders.update, version)
                    seen.append(await look(engine, f"v{version}"))
                if variant in BUDGETS:
                    check_staging(variant)
            finally:
                orders.end()
        assert errors == [] and await engine.ranks("feed_places") == places
        return seen

    try:
        if variant == IN_TURNS:
            check_turns(engine)
        a, b, c, again = engine.run(stream(), timeout_s=200)
    finally:
        engine.close()
    assert again == b
    for one, other in ((a, b), (b, c), (a, c)):
        same = [
            name for mine, yours in zip(one[0], other[0], strict=True) for name in mine if mine[name] == yours[name]
        ]
        assert same == [], "the versions must differ everywhere, or nothing is shown"
        assert one[1] != other[1]
    ours["engine"] = "fresh"
    fresh = Engine(folders["b"], additional_config={"megastream": ours}, **how)
    try:
        cold = fresh.run(look(fresh, "cold"))
        if family in RELOADED:
            fresh.run(fresh.ranks("feed_reload", str(folders["c"])))
            assert fresh.run(look(fresh, "reloaded")) == c
    finally:
        fresh.close()
    assert cold == again
