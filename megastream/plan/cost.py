"""What a plan costs per version: bytes per link and rank, how even they are, and how far above the floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megastream.layout.columns import columns_of, ints
from megastream.layout.pack import item_bytes
from megastream.layout.shard import RankLayout
from megastream.plan.types import Plan


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Bytes of payload per version. `floor_bytes` is what the engine ranks compute with: no padding, no unused copy.

    `balance` is the largest source's share against an even one (1.0: all trainer ranks send the same).
    """

    pieces: int
    copies: int
    payload_bytes: int
    floor_bytes: int
    by_link: dict[tuple[int, int], int]
    by_source: dict[int, int]
    by_target: dict[int, int]
    pieces_by_source: dict[int, int]
    pieces_by_target: dict[int, int]
    largest_piece_bytes: int

    @property
    def busiest_source(self) -> int:
        """The trainer rank that sends most; the lowest of several."""
        return max(self.by_source, key=lambda rank: (self.by_source[rank], -rank))

    @property
    def busiest_target(self) -> int:
        """The engine rank that receives most; the lowest of several."""
        return max(self.by_target, key=lambda rank: (self.by_target[rank], -rank))

    @property
    def balance(self) -> float:
        return max(self.by_source.values()) * len(self.by_source) / max(self.payload_bytes, 1)

    @property
    def overhead(self) -> float:
        """Payload against the floor; a plan gives exactly 1.0."""
        return self.payload_bytes / max(self.floor_bytes, 1)


def plan_cost(plan: Plan, engine: Sequence[RankLayout]) -> PlanCost:
    """Sums over the plan's pieces; the floor comes from the engine's layouts alone."""
    pieces, num_targets = plan.pieces, plan.num_engine_ranks
    links, inverse = np.unique(pieces.source * num_targets + pieces.target, return_inverse=True)
    by_link = np.bincount(inverse, pieces.num_bytes).astype(np.int64).tolist()
    by_source, by_target = (
        np.bincount(ranks, pieces.num_bytes, num).astype(np.int64).tolist()
        for ranks, num in ((pieces.source, plan.num_trainer_ranks), (pieces.target, num_targets))
    )
    return PlanCost(
        pieces=len(pieces),
        copies=int(pieces.num_copies.sum()),
        payload_bytes=plan.payload_bytes,
        floor_bytes=floor_bytes(engine),
        by_link={divmod(link, num_targets): size for link, size in zip(links.tolist(), by_link, strict=True)},
        by_source=dict(enumerate(by_source)),
        by_target=dict(enumerate(by_target)),
        pieces_by_source=dict(enumerate(np.bincount(pieces.source, minlength=plan.num_trainer_ranks).tolist())),
        pieces_by_target=dict(enumerate(np.bincount(pieces.target, minlength=num_targets).tolist())),
        largest_piece_bytes=int(pieces.num_bytes.max(initial=0)),
    )


def floor_bytes(engine: Sequence[RankLayout]) -> int:
    """Bytes of everything that the engine ranks compute with, each rank counted for itself."""
    total = 0
    for layout in engine:
        shards = columns_of(layout)
        volume, item = ints(box.volume for box in shards.boxes), ints(item_bytes(each.dtype) for each in layout.buffers)
        total += int((volume[shards.box] * item[shards.buffer]).sum())
    return total
