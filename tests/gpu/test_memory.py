"""What a finality policy takes of a GPU's memory beyond stock, counted by the allocator. `pytest -rP` shows figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megastream.trainer import compat, model
from megastream.trainer.config import TrainerConfig
from megastream.trainer.stepper import Listener
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import forward_backward
from tests.helpers.tiny import tiny_config
from tests.helpers.training import adapter_of

WIDE = tiny_config(layers=8, hidden=512, head_dim=64, experts=8, expert_ffn=512, vocab=2048, clip=0.3)
BUCKET_ELEMENTS = 1_000_000
WARM_UP_STEPS = 4


class Idle:
    """A policy that does nothing: it takes no memory, and must not pass for it."""

    aborts = 0

    def step(self) -> None: ...


def peak_body(rank: int, world_size: int, init_method: str, config: TrainerConfig, finality: str) -> dict[str, int]:
    """The most that one step has allocated at a time, with everything that lives on between steps; and what it did."""
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer, adapter = adapter_of(
        config, "early" if finality == "idle" else finality, bucket_elements=BUCKET_ELEMENTS
    )
    stepper: Any = Idle() if finality == "idle" else optimizer
    final: list[str] = []
    if finality not in ("stock", "idle"):
        stepper = adapter.stepper(finality, Listener(final.append), max_abort_rate=1.0)  # type: ignore[arg-type]
    for step in range(WARM_UP_STEPS + 1):
        if step == WARM_UP_STEPS:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        final.clear()
        forward_backward(config, chunks, step)
        in_backward = len(final)
        stepper.step()
    torch.cuda.synchronize()
    return {
        "in backward": in_backward,
        "final": len(set(final)),
        "buckets": len(adapter._buckets),
        "aborts": getattr(stepper, "aborts", 0),
        "peak": torch.cuda.max_memory_allocated(),
        "shard": 4 * sum(shard.main.numel() for shard in compat.main_shards(optimizer)),
        "bucket": 4 * max(bucket.data.numel() for bucket in adapter._buckets),
    }


def measure(finality: str) -> dict[str, int]:
    config = replace(WIDE, clip=0.0) if finality in ("early", "idle") else WIDE  # the others clip: all steps are undone
    (found,) = run_ranks(peak_body, 1, config=config, finality=finality, timeout_s=120)
    return dict(found)


@pytest.fixture(scope="module")
def stock() -> dict[str, int]:
    return measure("stock")


def check_work(found: dict[str, int], finality: str) -> None:
    """The step that was measured did what its policy is for."""
    assert found["final"] == found["buckets"] > 2
    assert (found["in backward"] > 0) == (finality in ("early", "speculative"))
    assert found["aborts"] == (WARM_UP_STEPS + 1 if finality == "speculative" else 0)


@pytest.mark.parametrize("finality", ["pipelined", "early", "speculative"])
def test_a_policy_takes_no_more_than_it_says(finality: str, stock: dict[str, int]) -> None:
    """`speculative` keeps three fp32 copies of the rank's optimizer shard, the others at most two buckets."""
    mine = measure(finality)
    check_work(mine, finality)
    extra = mine["peak"] - stock["peak"]
    copies = f"{extra / mine['shard']:+.3f} fp32 copies of the shard of {mine['shard']} bytes"
    print(f"{finality}: {copies}; two buckets are {2 * mine['bucket'] / mine['shard']:.3f}; stock peak {stock['peak']}")
    assert mine["shard"] == stock["shard"] > 100e6
    assert extra <= (3 * mine["shard"] if finality == "speculative" else 0) + 2 * mine["bucket"]


def test_a_policy_that_does_nothing_is_noticed(stock: dict[str, int]) -> None:
    """It takes less than any; what it did tells."""
    idle = measure("idle")
    assert idle["peak"] <= stock["peak"]
    with pytest.raises(AssertionError):
        check_work(idle, "early")
