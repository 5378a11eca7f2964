"""Every family, as vLLM itself loads it on each rank: every byte of every parameter is where our table says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megastream.families import FAMILIES, load_shape
from tests.helpers.family_models import random_transformers

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

LAYOUTS = [
    dict(tp=4, pp=1, ep=True),
    dict(tp=4, pp=1, ep=False),
    dict(tp=2, pp=2, ep=False),
    dict(tp=2, pp=2, ep=True),
    dict(tp=1, pp=3, ep=False),
]

_ENGINE = dict(num_hidden_layers=5, hidden_size=64, intermediate_size=128, head_dim=32, num_key_value_heads=2)
_ENGINE_MOE = dict(_ENGINE, moe_intermediate_size=128)
_LATENT = dict(num_hidden_layers=5, hidden_size=64, intermediate_size=128, moe_intermediate_size=128)
_LATENT |= dict(head_dim=64, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32)
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _ENGINE_MOE,
    "qwen2_moe": dict(_ENGINE_MOE, hidden_size=128, shared_expert_intermediate_size=64),
    "qwen3_next": dict(
        _ENGINE_MOE,
        shared_expert_intermediate_size=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "qwen3": _ENGINE,
    "llama": _ENGINE,
    "mixtral": _ENGINE,
    "glm4_moe": _ENGINE_MOE,
    "deepseek_v2": _LATENT,
    "deepseek_v3": dict(_LATENT, topk_method="noaux_tc"),
    "gpt_oss": dict(
        _ENGINE,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10_000.0,
            factor=2.0,
            original_max_position_embeddings=32,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
        ),
    ),
}
"""Sizes that vLLM's CPU attention and experts take."""

FEW_RANKS = [dict(tp=1, pp=1, ep=False), dict(tp=2, pp=1, ep=False), dict(tp=2, pp=1, ep=True), LAYOUTS[2]]
LAYOUTS_OF = {"gpt_oss": FEW_RANKS}
"""vLLM's own loader of GPT-OSS cannot give 4 ranks these 6 experts or 2 key heads."""


def test_fresh_loads_are_what_the_tables_say(tmp_path: Path) -> None:
    """Two heads of keys on four ranks, 6 experts on four, 5 layers on two and three stages; one process for all."""
    jobs = []
    for family in sorted(FAMILIES):
        model = random_transformers(family, **SIZES[family])
        model.to(torch.bfloat16).save_pretrained(tmp_path / family)
        is_dense = load_shape(tmp_path / family).num_experts == 0
        for number, layout in enumerate(LAYOUTS_OF.get(family, LAYOUTS)):
            if not (is_dense and layout["ep"]):  # vLLM refuses expert parallelism without experts
                jobs.append({"name": f"{family}-{number}", "model": str(tmp_path / family), **layout})
    jobs.append({"name": "packed", "model": str(tmp_path / "qwen3_moe"), "packed": True, **FEW_RANKS[0]})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    files = str(tmp_path / "jobs.json"), str(tmp_path / "results.json")
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.vllm_load", *files],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for job, ranks in zip(jobs, json.loads((tmp_path / "results.json").read_text()), strict=True):
        for rank, found in enumerate(ranks):
            where = f"{job['name']}, rank {rank}"
            assert found["compared"] > 10, where
            assert (found["differing"], found["strange_buffers"], found["unlike_planned"]) == ([], [], []), where
            assert found["state"] == [], f"{where}: what we write, and the state that vLLM saves and asks for"
    (packed,) = json.loads((tmp_path / "results.json").read_text())[-1]
    assert re.search(r"packed \(sharded_state\) lacks .*if an engine saved it whose kernels pack", packed["packed"])
