"""When a rank says that a bucket is final, every byte of it is new, also those that another rank stepped."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megastream.families import family_of, load_shape
from megastream.trainer import buckets, model
from megastream.trainer.adapter import MegatronAdapter
from megastream.trainer.config import TrainerConfig
from megastream.trainer.policies import Finality
from megastream.trainer.stepper import Listener
from tests.helpers.against_stock import forward_backward
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import hf_config, tiny_config

LR = 0.01
SLOW_RANK, SLOW_S = 3, 0.05


def _body(
    rank: int, world_size: int, init_method: str, config: TrainerConfig, finality: Finality, break_it: str
) -> dict[str, Any]:
    """One step in which every element falls by LR; what each bucket held when it was called final."""
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    stepped_s = _slow_down(rank)
    if break_it == "final before the gather":
        buckets.Bucket.gather = lambda bucket: []  # type: ignore[method-assign]
    chunks, optimizer = model.build(config)
    shape = load_shape(hf_config(config))
    adapter = MegatronAdapter(chunks, optimizer, family_of(shape), shape, bucket_elements=6000)
    before = {name: data.clone() for name, data in adapter.buffers.items()}
    exported: dict[str, torch.Tensor] = {}
    final_s: dict[str, float] = {}

    def final(name: str) -> None:
        final_s[name] = time.monotonic()
        exported[name] = adapter.buffers[name].clone()

    stepper = adapter.stepper(finality, Listener(final))
    forward_backward(chunks, config, 0)
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            # Adam's first step goes as far as the learning rate against any gradient, however large.
            buffer.grad_data.fill_(1.0)
    assert stepper.step().ok
    layout = adapter.describe()
    old = 0
    for shard in layout.shards:
        place = shard.box.shape, shard.strides, shard.offset
        was, now = (flat[shard.buffer].contiguous().as_strided(*place) for flat in (before, exported))
        old += int((now - (was - LR)).abs().gt(1e-5).sum())
    kinds = {name.split(".")[1].rstrip("0123456789") for name in exported}
    return {"final_s": final_s, "stepped_s": stepped_s, "old": old, "kinds": kinds, "buckets": set(adapter.buffers)}


def _streamed_body(
    rank: int, world_size: int, init_method: str, config: TrainerConfig, finality: Finality, unwaited: bool
) -> dict[str, Any]:
    """Two steps, the first of which learns the order of gradients: what each bucket held when it was called final."""
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer = model.build(config)
    shape = load_shape(hf_config(config))
    adapter = MegatronAdapter(chunks, optimizer, family_of(shape), shape, bucket_elements=6000, finality=finality)
    exported: dict[str, torch.Tensor] = {}
    listener = Listener(lambda name: exported.update({name: adapter.buffers[name].clone()}))
    stepper = adapter.stepper(finality, listener, max_abort_rate=1.0)
    forward_backward(chunks, config, 0)
    assert stepper.step().ok
    before = {name: data.clone() for name, data in adapter.buffers.items()}
    exported.clear()
    gathering = _do_not_wait() if unwaited else []
    slow = _slow_down(rank, slow_rank=1)
    forward_backward(chunks, config, 1)
    in_backward = len(exported)
    assert stepper.step().ok
    for work in gathering:
        work.wait()
    dist.barrier()
    after = adapter.buffers
    return {
        "old": sum(int((data != after[name]).sum()) for name, data in exported.items()),
        "unchanged": [name for name in after if torch.equal(before[name], after[name])],
        "missing": [name for name in after if name not in exported],
        "in backward": in_backward,
        "slow": len(slow),
    }


def _do_not_wait() -> list[dist.Work]:
    """Buckets are gathered, but nobody waits for it."""
    gathering: list[dist.Work] = []
    gather = buckets.Bucket.gather

    def unwaited(bucket: buckets.Bucket) -> list[dist.Work]:
        gathering.extend(gather(bucket))
        return []

    buckets.Bucket.gather = unwaited  # type: ignore[method-assign]
    return gathering


def _slow_down(rank: int, slow_rank: int = SLOW_RANK) -> dict[str, float]:
    """One rank takes its time; when it was done with each bucket that it owns a part of, on the machine's clock."""
    stepped_s: dict[str, float] = {}
    update = buckets.Bucket.update

    def slow(bucket: buckets.Bucket, *args: Any) -> None:
        time.sleep(SLOW_S)
        update(bucket, *args)
        if bucket.shards:
            stepped_s[bucket.name] = time.monotonic()

    if rank == slow_rank:
        buckets.Bucket.update = slow  # type: ignore[method-assign]
    return stepped_s


CONFIG = dict(layers=1, ep=2, dtype="float32", lr=LR, clip=0.0, overlap_grad_reduce=True, ddp_bucket_elements=20_000)


@pytest.mark.parametrize("finality", ["pipelined", pytest.param("whole", marks=pytest.mark.full)])
def test_a_final_bucket_is_new_in_every_element(finality: Finality) -> None:
    """Four replicas, experts in two; no rank calls a bucket final before the slowest owner has stepped its part."""
    ranks = run_ranks(_body, 4, config=tiny_config(**CONFIG), finality=finality, break_it="")
    slow = ranks[SLOW_RANK]["stepped_s"]
    for facts in ranks:
        assert facts["kinds"] == {"dense", "expert"}
        assert set(facts["final_s"]) == facts["buckets"]
        assert facts["old"] == 0
    if finality == "pipelined":
        shared = [(name, facts["final_s"][name]) for facts in ranks[:3] for name in slow if name in facts["final_s"]]
        dense = [(name, at) for name, at in shared if ".dense" in name]
        assert len(dense) == 3 * sum(".dense" in name for name in slow)
        assert [name for name, at in dense if at < slow[name]] == []


def test_a_bucket_called_final_before_the_gather_is_caught() -> None:
    config, broken = tiny_config(**CONFIG), "final before the gather"
    assert all(facts["old"] for facts in run_ranks(_body, 4, config=config, finality="pipelined", break_it=broken))


STREAMED = dict(layers=1, dtype="float32")


@pytest.mark.full
@pytest.mark.parametrize(("finality", "clip"), [("early", 0.0), ("speculative", 0.0), ("speculative", 1e-3)])
def test_a_bucket_that_is_final_inside_the_backward_is_new_in_every_element(finality: Finality, clip: float) -> None:
    """Two replicas, one of them slow. What is exported is what the step leaves, also when it is taken back."""
    ranks = run_ranks(
        _streamed_body, 2, config=tiny_config(clip=clip, **STREAMED), finality=finality, unwaited=False, timeout_s=60
    )
    for facts in ranks:
        assert facts["old"] == 0 and facts["unchanged"] == facts["missing"] == []
        assert facts["in backward"] > 0
    assert ranks[1]["slow"] > 1


@pytest.mark.full
@pytest.mark.parametrize("finality", ["early", "speculative"])
def test_a_bucket_called_final_inside_the_backward_before_it_is_gathered_is_caught(finality: Finality) -> None:
    config = tiny_config(clip=0.0, **STREAMED)
    ranks = run_ranks(_streamed_body, 2, config=config, finality=finality, unwaited=True, timeout_s=60)
    assert ranks[0]["old"] > 0, "what the slow replica steps was not there yet"
