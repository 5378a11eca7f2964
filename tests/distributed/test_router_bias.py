"""Routers' biases, which `finalize_model_grads` moves: equal to stock under every policy, and sent as they are then."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megastream.trainer import model
from megastream.trainer.config import TrainerConfig
from megastream.trainer.router_bias import BUFFER
from tests.distributed.test_matrix import compare_steps
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import STEPS, Run, SkippedStep, compare, compare_clipped, in_turn, train_all
from tests.helpers.tiny import tiny_glm4
from tests.helpers.training import adapter_of, router_biases


def test_pp2_ep2_equals_stock_when_every_step_is_undone() -> None:
    """The first stage has no router, the last one a layer of multi-token prediction beside its own."""
    config = tiny_glm4(pp=2, ep=2, layers=2, mtp_layers=1, clip=0.3)
    for rank, (stock, speculative) in enumerate(compare(config, 4, ("speculative",))):
        assert speculative["aborts"] == STEPS
        assert (len(set(stock["sent biases"])) > STEPS // 2) == (rank >= 2), "steps move them"


@pytest.mark.full
def test_a_bias_that_leaves_before_finalize_model_grads_shows() -> None:
    """Everything else is stock's, and what leaves is a step behind."""
    config = tiny_glm4(ep=2, layers=2, clip=0.3)
    runs = (Run("stock"), Run("pipelined", broken="bias before finalize"))
    for stock, broken in train_all(config, 2, runs):
        assert stock["params"] == broken["params"] and stock["biases"] == broken["biases"]
        assert broken["in order"] and stock["sent biases"] != broken["sent biases"]
        assert stock["sent biases"][:-1] == broken["sent biases"][1:]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2 ep2": (4, dict(pp=2, ep=2)),
    "ep2 fp32": (2, dict(ep=2, dtype="float32", layers=2)),
    "pp2 vpp2 recompute": (2, dict(pp=2, vpp=2, recompute="full")),
    "tp2 ep2 alltoall": (2, dict(tp=2, ep=2, etp=1, dispatcher="alltoall", layers=2)),
    "cp2": (2, dict(cp=2, layers=2)),
    "pp2 dp2 overlapped": (
        4,
        dict(pp=2, stage_layers=(1, 3), overlap_grad_reduce=True, ddp_bucket_elements=20_000),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "clip"), in_turn(tuple(LAYOUTS)))
def test_other_layouts_equal_stock(name: str, clip: str) -> None:
    world_size, settings = LAYOUTS[name]
    results = compare_clipped(lambda limit: tiny_glm4(clip=limit, **settings), world_size, clip)
    assert all(len(set(stock["sent biases"])) > STEPS // 2 for stock, *_ in results[-1:])


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "world_size"),
    [(dict(pp=2, ep=2, clip=0.3), 4), (dict(tp=2, ep=2, etp=1, clip=0.0), 2), (dict(pp=2, vpp=2, clip=0.3), 2)],
    ids=["pp2 ep2", "tp2 ep2", "pp2 vpp2"],
)
def test_what_was_trained_computes_what_transformers_computes(
    settings: dict[str, Any], world_size: int, tmp_path: Path
) -> None:
    """After 20 steps whose biases change which experts are chosen; and shards are what a slow gather finds."""
    policies = ("pipelined", "speculative" if settings["clip"] else "early")
    compare_steps(tiny_glm4(dtype="float32", **settings), world_size, policies, tmp_path)


def _skipped_body(rank: int, world_size: int, init_method: str, config: TrainerConfig, finality: Any) -> list[Any]:
    """Of a good step, a spoilt one and two good ones: whether it counts, and how the biases and what leaves moved."""
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer, adapter = adapter_of(config, finality)
    step = SkippedStep(config, chunks, optimizer, adapter, finality, broken_rank=world_size - 1)
    found = []
    for bad in (False, True, False, False):
        live, sent = torch.cat(router_biases(chunks)), adapter.buffers[BUFFER].clone()
        ok = step.run(math.nan if bad else 0.0).ok
        now, leaves = torch.cat(router_biases(chunks)), adapter.buffers[BUFFER]
        found.append((ok, not now.equal(live), not leaves.equal(sent), leaves.equal(now)))
    return found


@pytest.mark.full
@pytest.mark.parametrize("finality", ["pipelined", "speculative"])
def test_a_skipped_step_moves_biases_as_stock_does_but_sends_none(finality: str) -> None:
    """Megatron moves them before anybody knows of the norm; what older versions have stays as it was sent."""
    config = tiny_glm4(ep=2, layers=2, clip=1.0)
    for results in run_ranks(_skipped_body, 2, config=config, finality=finality):
        good, skipped = (True, True, True, True), (False, True, False, False)
        assert results == [good, skipped, good, good]
