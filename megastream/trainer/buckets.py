"""Buckets: the flat runs of parameters that become final together, and how one of them is stepped.

Megatron's own DDP buckets are left as they are. Their cuts decide which rank steps which element, hence the order in
which the gradient norm is summed, so other cuts give another norm in the last bits. A stock run keeps one DDP bucket
per stage and kind; we cut it into runs of whole parameters and step, gather and emit run by run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megastream.trainer import compat

BUCKET_ELEMENTS = 8_000_000
"""Default size at which a run of parameters is closed."""


@dataclass(frozen=True)
class OwnedRange:
    """Elements [start, end) of a bucket that rank `owner` of its group steps."""

    owner: int
    start: int
    end: int


@dataclass
class Bucket:
    """Whole parameters, one behind the other, that become final together.

    `data` is a flat view into megatron's parameter buffer, in model dtype. `params` are (parameter, offset in data).
    `shards` are this rank's part, with the bounds of `data` that they cover.
    """

    name: str
    data: torch.Tensor
    params: tuple[tuple[torch.nn.Parameter, int], ...]
    group: dist.ProcessGroup
    ranges: tuple[OwnedRange, ...]
    shards: list[tuple[compat.MainShard, int, int]] = field(default_factory=list)

    def update(self, norm: float, split: compat.SplitStep) -> None:
        """Clips, steps and copies back this rank's part of the bucket, exactly as stock does it for all at once."""
        for member in _unique(shard.member for shard, _, _ in self.shards):
            mine = [shard for shard, _, _ in self.shards if shard.member is member]
            compat.clip(member, [shard.main for shard in mine], norm)
            split.step(member, mine)
        for shard, start, end in self.shards:
            self.data[start:end].copy_(shard.main)

    def gather(self) -> list[dist.Work]:
        """Starts sending every owner's range to the rest of the group; the bucket is final when all are waited for."""
        if self.group.size() == 1:
            return []
        return [
            dist.broadcast(self.data[r.start : r.end], group=self.group, group_src=r.owner, async_op=True)
            for r in self.ranges
        ]


def cut(chunks: Sequence[Any], optimizer: Any, bucket_elements: int = BUCKET_ELEMENTS) -> tuple[Bucket, ...]:
    """This rank's buckets, in the order in which they are stepped: equal on all ranks of a bucket's group.

    The order takes turns between the owners' slices, so that all ranks of a group have something to step at once.
    """
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements={bucket_elements}; a bucket needs at least 1 element")
    shards: dict[torch.nn.Parameter, compat.MainShard] = {s.param: s for s in compat.main_shards(optimizer)}
    buckets = []
    for whole in compat.ddp_buckets(chunks):
        size = whole.data.numel() // whole.group.size()
        runs = sorted(_runs(whole, size, bucket_elements), key=lambda run: (run[0][1] % size, run[0][1]))
        buckets += [_bucket(f"{whole.name}.{n}", whole, run, size, shards) for n, run in enumerate(runs)]
    return tuple(buckets)


_Span = tuple[torch.nn.Parameter, int, int]


def _runs(whole: compat.DdpBucket, slice_elements: int, bucket_elements: int) -> Iterable[list[_Span]]:
    """Consecutive parameters up to `bucket_elements`; a run ends where the next parameter starts in another slice."""
    run: list[_Span] = []
    for span in whole.params:
        full = run and run[-1][2] - run[0][1] >= bucket_elements
        if run and (full or run[0][1] // slice_elements != span[1] // slice_elements):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _bucket(
    name: str,
    whole: compat.DdpBucket,
    run: list[_Span],
    slice_elements: int,
    shards: dict[torch.nn.Parameter, compat.MainShard],
) -> Bucket:
    low, high = run[0][1], run[-1][2]
    ranges = []
    for owner in range(low // slice_elements, (high - 1) // slice_elements + 1):
        start, end = max(low, owner * slice_elements), min(high, (owner + 1) * slice_elements)
        ranges.append(OwnedRange(owner, start - low, end - low))
    mine = [shards[param] for param, _, _ in run if param in shards]
    return Bucket(
        name,
        whole.data[low:high],
        tuple((param, start - low) for param, start, _ in run),
        whole.group,
        tuple(ranges),
        [(shard, shard.start - low, shard.end - low) for shard in mine],
    )


def _unique(members: Iterable[Any]) -> list[Any]:
    return list({id(member): member for member in members}.values())
