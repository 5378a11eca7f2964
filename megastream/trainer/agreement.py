"""What one rank finds wrong is everybody's error: raised on all ranks, said by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


class AgreedError(ValueError):
    """An error that every rank of the group raises with the same words; only rank 0 needs to say it."""


@contextmanager
def together(*errors: type[BaseException]) -> Iterator[None]:
    """All ranks run the block; when it raises one of `errors` on any of them, every rank raises AgreedError.

    Collective, also on ranks where the block went well. Blocks until the slowest rank has come: the group's own
    timeout is the deadline. The words are those of the lowest rank that failed.
    """
    reason: str | None = None
    try:
        yield
    except AgreedError:
        raise
    except errors as error:
        reason = " ".join(str(error).split()) or type(error).__name__
    raise_first(gather(reason))


def gather(mine: Any) -> list[Any]:
    """What every rank gives, in rank order. Collective; small things only."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def raise_first(reasons: list[str | None]) -> None:
    """AgreedError with the first reason that is one; names the rank unless all say the same."""
    failed = [(rank, reason) for rank, reason in enumerate(reasons) if reason]
    if failed:
        rank, reason = failed[0]
        same = len(failed) == len(reasons) and len({text for _, text in failed}) == 1
        raise AgreedError(reason if same or rank == 0 else f"trainer rank {rank}: {reason}")
