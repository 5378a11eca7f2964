"""On CUDA and NCCL, with TransformerEngine's fused Adam where it is there, every policy equals stock bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_layouts import loss_body
from tests.helpers.against_stock import masked_batches, random_checkpoint, transformers_loss, write_checkpoint
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import ALL, STEPS, Run, compare, mixed_clip, train_all
from tests.helpers.tiny import tiny_config, tiny_qwen2


@pytest.mark.parametrize("clip", ["never", "always", "sometimes"])
def test_one_rank_equals_stock(clip: str) -> None:
    """Fused Adam counts steps in its groups, so an abort must not advance them."""
    limit = {"never": 0.0, "always": 0.3}.get(clip) or (mixed_clip(tiny_config(), 1) if clip == "sometimes" else 0.0)
    policies = ("whole", "pipelined", "speculative") if limit else ALL
    for stock, *_, speculative in compare(tiny_config(clip=limit), 1, policies):
        assert speculative["aborts"] == stock["clipped"] == {"never": 0, "always": STEPS}.get(clip, stock["clipped"])
        assert speculative["early"] == speculative["buckets"]
        assert clip != "sometimes" or 0 < speculative["aborts"] < STEPS


@pytest.mark.parametrize("layout", [{"pp": 2}, {"ep": 2}])
@pytest.mark.parametrize("clip", [0.3, 0.0])
def test_two_ranks_equal_stock(layout: dict[str, int], clip: float) -> None:
    policies = ("whole", "pipelined", "speculative") if clip else ALL
    for stock, _, pipelined, *_, speculative in compare(tiny_config(clip=clip, **layout), 2, policies):
        assert speculative["aborts"] == stock["clipped"] == (STEPS if clip else 0)
        assert pipelined["buckets"] > 2 and speculative["early"] == speculative["buckets"]


@pytest.mark.parametrize("broken", ["skip one bucket", "no undo"])
def test_what_must_not_be_left_out_shows(broken: str) -> None:
    config = tiny_config(clip=0.3, layers=2)
    finality = "speculative" if broken == "no undo" else "pipelined"
    ((stock, other),) = train_all(config, 1, (Run("stock"), Run(finality, broken=broken)))
    assert stock["params"] != other["params"] and stock["trace"] != other["trace"]


@pytest.mark.parametrize("settings", [dict(recompute="selective"), dict(recompute="full"), dict(per_token_loss=True)])
def test_features_on_one_gpu_equal_stock(settings: dict[str, Any]) -> None:
    compare(tiny_qwen2(hidden=64, head_dim=8, clip=0.3, **settings), 1, ("whole", "pipelined"))


def test_qwen2_computes_what_transformers_computes(tmp_path: Path) -> None:
    """Also with TransformerEngine, whose names differ. Its fp32 products are rounded to TF32."""
    config = tiny_qwen2(hidden=64, head_dim=8, dtype="float32", top_k=8)
    write_checkpoint(config, tmp_path, random_checkpoint(config))
    (loss,) = run_ranks(loss_body, 1, config=config, folder=str(tmp_path), megatron={})
    assert loss == pytest.approx(transformers_loss(config, tmp_path, masked_batches(config, 0, 0)), abs=5e-3)
