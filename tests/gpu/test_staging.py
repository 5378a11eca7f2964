"""Staging in a GPU's memory: a commit that was enqueued reads its set before anybody writes into it again."""

from __future__ import annotations

import torch

from megastream.engine.staging import StagingMemory
from megastream.layout.shard import BufferSpec, RankLayout
from megastream.plan.types import Copy

ELEMENTS, SLEEP_CYCLES = 1 << 16, 400_000_000
COPY = Copy("t", (ELEMENTS,), 0, (1,), "live", 0, (1,))


def staging() -> StagingMemory:
    layout = RankLayout(
        side="engine",
        rank=0,
        world_size=1,
        coords={},
        tensors=(),
        buffers=(BufferSpec("live", ELEMENTS, "float32"),),
        shards=(),
    )
    return StagingMemory(layout, {"live": (COPY,)}, 1, pin_memory=False, device="cuda:0")


def committed_then_written(waits: bool) -> float:
    """What a late commit copies into the live tensor, while the next version is written into the same set."""
    memory, live = staging(), torch.zeros(ELEMENTS, device="cuda:0")
    staged = memory.buffers(0)["live"]
    staged.fill_(1.0)
    torch.cuda.synchronize()
    worker, lane = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(worker):
        torch.cuda._sleep(SLEEP_CYCLES)  # the step before the commit
        live.copy_(staged)
        memory.reads(0)
    with torch.cuda.stream(lane):
        if waits:
            memory.await_reads(0)
        memory.buffers(0)["live"].fill_(2.0)
    torch.cuda.synchronize()
    return float(live.min())


def test_the_next_version_waits_for_the_commit_before_it() -> None:
    assert committed_then_written(waits=True) == 1.0
    assert committed_then_written(waits=False) == 2.0, "without the wait it would be overwritten, so the test can fail"


def test_elements_that_never_came_are_not_numbers() -> None:
    assert bool(staging().buffers(0)["live"].isnan().all())
