"""Which buckets hold gradients that are not finite: said once, by rank 0, when a step does not count for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megastream.trainer.buckets import Bucket

_SHOWN = 3

logger = logging.getLogger(__name__)


def name_not_finite(buckets: Sequence[Bucket], name_of: Callable[[torch.nn.Parameter], str], then: str) -> None:
    """Rank 0 logs what `not_finite` found, and what happens now (`then`). Collective, blocking."""
    found = not_finite(buckets, name_of)
    if dist.get_rank() == 0:
        logger.error("%s; %s", found, then)


@torch.no_grad()
def not_finite(buckets: Sequence[Bucket], name_of: Callable[[torch.nn.Parameter], str]) -> str:
    """Bucket, parameter and rank of every gradient that is not finite, in the same words on every rank.

    Every rank of the trainer calls it, after the gradients were reduced; collective, blocking.
    """
    found = [f"{bucket.name} ({name})" for bucket in buckets for name in _broken(bucket, name_of)]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    named = [f"{what} on rank {rank}" for rank, each in enumerate(everywhere) for what in each]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    where = f"{', '.join(named[:_SHOWN])}{more}" if named else "no single bucket: their squares overflow in the norm"
    return f"gradients are not finite in {where}"


def _broken(bucket: Bucket, name_of: Callable[[torch.nn.Parameter], str]) -> list[str]:
    """Parameters of a bucket with such gradients, in the part that this rank steps."""
    return [
        name_of(shard.param)
        for shard, start, end in bucket.shards
        if not bool(torch.isfinite(bucket.grads[start:end]).all())
    ]
