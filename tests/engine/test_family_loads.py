"""Every family, as vLLM itself loads it on each rank: every byte of every parameter is where our table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megastream.families import FAMILIES, load_shape
from tests.helpers.family_models import ENGINE_SIZES, random_transformers

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

LAYOUTS = [
    dict(tp=4, pp=1, ep=True),
    dict(tp=4, pp=1, ep=False),
    dict(tp=2, pp=2, ep=False),
    dict(tp=2, pp=2, ep=True),
    dict(tp=1, pp=3, ep=False),
]

LEFT_OUT = {"gpt_oss"}
"""vLLM's own loader of GPT-OSS cannot give 4 ranks these 6 experts or 2 key heads."""


def test_fresh_loads_are_what_the_tables_say(tmp_path: Path) -> None:
    """Two heads of keys on four ranks, 6 experts on four, 5 layers on two and three stages; one process for all."""
    jobs = []
    for family in sorted(FAMILIES.keys() - LEFT_OUT):
        model = random_transformers(family, **ENGINE_SIZES[family])
        model.to(torch.bfloat16).save_pretrained(tmp_path / family)
        is_dense = load_shape(tmp_path / family).num_experts == 0
        for number, layout in enumerate(LAYOUTS):
            if not (is_dense and layout["ep"]):  # vLLM refuses expert parallelism without experts
                jobs.append({"name": f"{family}-{number}", "model": str(tmp_path / family), **layout})
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
