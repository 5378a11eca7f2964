"""Whole and pipelined steps equal stock `optimizer.step()` bit for bit, over stock DDP."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch

from megastream.trainer import buckets, compat, model
from megastream.trainer.adapter import mesh_coords
from megastream.trainer.config import TrainerConfig
from megastream.trainer.finality import make_stepper
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import BATCH, MICROBATCHES, SEQUENCE, batches, tiny_config

STEPS = 10


def _digest(tensors: Any) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _train(config: TrainerConfig, finality: str, bucket_elements: int, break_it: str) -> dict[str, Any]:
    chunks, optimizer = model.build(config)
    cut = buckets.cut(chunks, optimizer, bucket_elements)
    before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    order: list[str] = []
    stepper = None if finality == "stock" else make_stepper(finality, optimizer, cut, order.append)
    if break_it == "skip one bucket":
        cut[0].shards.clear()
    trace = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 + 0.1 * step)
        loss = model.train_step(
            chunks,
            batches(config, step, mesh_coords()["dp"]),
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
        )
        if stepper is None:
            ok, norm, _ = optimizer.step()
        else:
            result = stepper.step()
            ok, norm = result.ok, result.grad_norm
        assert ok
        trace.append((loss, float(norm)))
    params = [p for chunk in chunks for p in chunk.parameters()]
    moved = sum(not torch.equal(a, b) for a, b in zip(before, params, strict=True))
    states = [shard.member.optimizer.state[shard.main] for shard in compat.main_shards(optimizer)]
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq", "step") if key in state]
    masters = [shard.main for shard in compat.main_shards(optimizer)]
    return {
        "trace": trace,
        "params": _digest(params),
        "moments": _digest(moments),
        "masters": _digest(masters),
        "unmoved": len(params) - moved,
        "buckets": len(cut),
        "final": order == [bucket.name for bucket in cut] * STEPS,
        "clipped": sum(norm > config.clip > 0 for _, norm in trace),
    }


def _body(
    rank: int,
    world_size: int,
    init_method: str,
    config: TrainerConfig,
    runs: tuple[tuple[str, int, str], ...],
) -> list[dict[str, Any]]:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    return [_train(config, *run) for run in runs]


def compare_with_stock(
    config: TrainerConfig, world_size: int, bucket_elements: int = 6000
) -> list[list[dict[str, Any]]]:
    runs = (("stock", bucket_elements, ""), ("whole", bucket_elements, ""), ("pipelined", bucket_elements, ""))
    results = run_ranks(_body, world_size, config=config, runs=runs, timeout_s=100)
    for stock, whole, pipelined in results:
        assert stock["unmoved"] == 0
        assert whole["final"] and pipelined["final"]
        for key in ("trace", "params", "moments", "masters"):
            assert stock[key] == whole[key] == pipelined[key], key
    return results


def test_pp2_ep2_bf16_with_clipping_equals_stock() -> None:
    config = tiny_config(pp=2, ep=2, clip=0.3)
    for stock, _, pipelined in compare_with_stock(config, 4):
        assert stock["clipped"] == STEPS
        assert pipelined["buckets"] >= 6, "every stage must have several buckets"


@pytest.mark.full
@pytest.mark.parametrize(
    "name, settings, world_size",
    [
        ("dp2 fp32", dict(dtype="float32", clip=0.3), 2),
        ("dp2 fp32 without clipping", dict(dtype="float32", clip=0.0), 2),
        ("dp4 ep2 fp32", dict(ep=2, dtype="float32", clip=0.3), 4),
        ("pp2 dp2 tied", dict(pp=2, tied=True, clip=0.3), 4),
        ("pp2 tp2", dict(pp=2, tp=2, clip=0.3), 4),
        ("tp2 ep2 etp1", dict(tp=2, ep=2, etp=1, clip=0.3), 2),
        ("pp2 vpp2 alltoall", dict(pp=2, vpp=2, dispatcher="alltoall", clip=0.3), 2),
        ("pp2 ep2, stock buckets overlapped", dict(pp=2, ep=2, overlap_grad_reduce=True, ddp_bucket_elements=20000), 4),
    ],
)
def test_other_layouts_equal_stock(name: str, settings: dict[str, Any], world_size: int) -> None:
    compare_with_stock(tiny_config(**settings), world_size)


def test_a_bucket_that_is_not_stepped_shows() -> None:
    """The comparison above notices when one bucket of one rank is left out."""
    config = tiny_config(clip=0.3)
    runs = (("stock", 6000, ""), ("pipelined", 6000, "skip one bucket"))
    stock, broken = run_ranks(_body, 1, config=config, runs=runs)[0]
    assert stock["params"] != broken["params"]
    assert stock["trace"] != broken["trace"]


def _not_finite_body(rank: int, world_size: int, init_method: str, config: TrainerConfig, finality: Any) -> Any:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer = model.build(config)
    final: list[str] = []
    stepper = make_stepper(finality, optimizer, buckets.cut(chunks, optimizer, 6000), final.append)
    results = []
    for value in (1.0, math.nan):
        final.clear()
        before = _digest(p for chunk in chunks for p in chunk.parameters())
        for chunk in chunks:
            for buffer in chunk.buffers:
                buffer.grad_data.fill_(1.0)
                if rank == world_size - 1:
                    buffer.grad_data[-200] = value
        result = stepper.step()
        after = _digest(p for chunk in chunks for p in chunk.parameters())
        results.append((result.ok, math.isfinite(result.grad_norm), bool(final), before == after))
    return results


@pytest.mark.parametrize(("finality", "untouched"), [("pipelined", True), ("whole", False)])
def test_gradients_that_are_not_finite_make_no_version(finality: str, untouched: bool) -> None:
    """One rank's NaN is everybody's: not ok, nothing final. Pipelined leaves the weights alone; stock does not."""
    for good, bad in run_ranks(_not_finite_body, 2, config=tiny_config(layers=1), finality=finality):
        assert good == (True, True, True, False)
        assert bad == (False, False, False, untouched)
