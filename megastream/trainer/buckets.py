"""Buckets: the flat runs of parameters that become final together, and how one of them is reduced and stepped.

Megatron's own DDP buckets are left as they are. Their cuts decide which rank steps which element, hence the order in
which the gradient norm is summed, so other cuts give another norm in the last bits. A stock run keeps one DDP bucket
per stage and kind; we cut it into runs of whole parameters and reduce, step, gather and emit run by run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megastream.trainer import compat
from megastream.trainer.split import Norm, SplitStep, clip

BUCKET_ELEMENTS = 8_000_000
"""Default size at which a run of parameters is closed."""

BorderOf = Callable[[torch.nn.Parameter], Hashable]
"""A run of parameters ends where this value changes."""


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
    `shards` are this rank's part, with the bounds of `data` that they cover. `grads` are the main gradients of the same
    elements. `late`: finalize_model_grads still changes gradients of it after the reduction. `turn`: its place in the
    order in which the owners of a group have something to step at once.
    """

    name: str
    data: torch.Tensor
    params: tuple[tuple[torch.nn.Parameter, int], ...]
    group: dist.ProcessGroup
    ranges: tuple[OwnedRange, ...]
    grads: torch.Tensor
    grad_scale: float
    reduce_op: Any
    late: bool
    turn: int
    shards: list[tuple[compat.MainShard, int, int]] = field(default_factory=list)

    @property
    def owned(self) -> tuple[int, int]:
        """Elements [start, stop) of `data` that this rank steps, and whose bytes are final before `gather`."""
        mine = [(r.start, r.end) for r in self.ranges if r.owner == self.group.rank()]
        return mine[0] if mine else (0, 0)

    def reduce(self) -> list[dist.Work]:
        """Starts summing every owner's range of the gradients over the group; each ends up with its owner only.

        Two replicas give the bits of megatron's reduce-scatter, as a + b = b + a; with more of them the order of the
        sum is the transport's. Once per step: a second time would scale and sum what is summed already.
        """
        if self.grad_scale != 1.0:
            self.grads.mul_(self.grad_scale)
        if self.group.size() == 1:
            return []
        return [
            dist.reduce(
                self.grads[r.start : r.end], group=self.group, group_dst=r.owner, op=self.reduce_op, async_op=True
            )
            for r in self.ranges
        ]

    def load_grads(self) -> None:
        """Gives this rank's masters their gradients, as stock does before it takes the norm."""
        for shard, start, end in self.shards:
            shard.main.grad = self.grads[start:end].float()

    def update(self, norm: Norm | None, split: SplitStep) -> None:
        """Clips, steps and copies back this rank's part of the bucket, exactly as stock does it for all at once.

        Without a norm nothing is clipped: what stock does when the norm turns out not to be too large.
        """
        for member in _unique(shard.member for shard, _, _ in self.shards):
            mine = [shard for shard, _, _ in self.shards if shard.member is member]
            if norm is not None:
                clip(member, [shard.main for shard in mine], norm)
            split.step(member, mine)
        self.store()

    def store(self) -> None:
        """Copies this rank's masters into the weights."""
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


def cut(
    chunks: Sequence[Any],
    optimizer: Any,
    bucket_elements: int = BUCKET_ELEMENTS,
    *,
    border_of: BorderOf | None = None,
    late: Collection[torch.nn.Parameter] = (),
) -> tuple[Bucket, ...]:
    """This rank's buckets, in the order in which they become final: equal on all ranks of a bucket's group.

    A bucket has at least `bucket_elements`, unless `border_of` ends it. Parameters in `late` have buckets of their own.
    Without borders buckets become final behind the backward, and take turns between their owners' slices, so that all
    ranks of a group have something to step at once. With borders they become final as the backward reaches them: the
    parameters that the forward uses last come first, and late ones come last.
    """
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements={bucket_elements}; a bucket needs at least 1 element")
    shards: dict[torch.nn.Parameter, compat.MainShard] = {s.param: s for s in compat.main_shards(optimizer)}

    def border(param: torch.nn.Parameter) -> Hashable:
        if param in late:
            return "late"
        return None if border_of is None else (border_of(param),)

    buckets: list[Bucket] = []
    for whole in compat.ddp_buckets(chunks):
        size = whole.data.numel() // whole.group.size()
        runs = sorted(_runs(whole, size, bucket_elements, border), key=lambda run: (run[0][1] % size, run[0][1]))
        for n, run in enumerate(runs):
            buckets.append(_bucket(f"{whole.name}.{n}", whole, run, size, shards, late, len(buckets)))
    if border_of is not None:
        forward = {param: place for place, param in enumerate(p for chunk in chunks for p in chunk.parameters())}
        buckets.sort(key=lambda b: (b.late, -min(forward[param] for param, _ in b.params)))
    return tuple(buckets)


def in_turns(buckets: Iterable[Bucket]) -> list[Bucket]:
    """These buckets in an order in which all ranks of a group have something to step at once."""
    return sorted(buckets, key=lambda bucket: bucket.turn)


_Span = tuple[torch.nn.Parameter, int, int]


def _runs(
    whole: compat.DdpBucket, slice_elements: int, bucket_elements: int, border: BorderOf
) -> Iterable[list[_Span]]:
    """Consecutive parameters up to `bucket_elements`; a run ends at a border, and where the next slice begins."""
    run: list[_Span] = []
    for span in whole.params:
        if run and (
            run[-1][2] - run[0][1] >= bucket_elements
            or run[0][1] // slice_elements != span[1] // slice_elements
            or border(run[0][0]) != border(span[0])
        ):
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
    late: Collection[torch.nn.Parameter],
    turn: int,
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
        whole.grads[low:high],
        whole.grad_scale,
        whole.reduce_op,
        any(param in late for param, _, _ in run),
        turn,
        [(shard, shard.start - low, shard.end - low) for shard in mine],
    )


def _unique(members: Iterable[Any]) -> list[Any]:
    return list({id(member): member for member in members}.values())
