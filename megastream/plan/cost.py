"""What a plan costs per version: bytes per link and rank, how even they are, and how far above the floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    largest_piece_bytes: int

    @property
    def balance(self) -> float:
        return max(self.by_source.values()) * len(self.by_source) / max(self.payload_bytes, 1)

    @property
    def overhead(self) -> float:
        """Payload against the floor; a plan gives exactly 1.0."""
        return self.payload_bytes / max(self.floor_bytes, 1)


def plan_cost(plan: Plan, engine: Sequence[RankLayout]) -> PlanCost:
    """Sums over the plan's pieces; the floor comes from the engine's layouts alone."""
    by_link: dict[tuple[int, int], int] = {}
    by_source = dict.fromkeys(range(plan.num_trainer_ranks), 0)
    by_target = dict.fromkeys(range(plan.num_engine_ranks), 0)
    for piece in plan.pieces:
        link = piece.source, piece.target
        by_link[link] = by_link.get(link, 0) + piece.num_bytes
        by_source[piece.source] += piece.num_bytes
        by_target[piece.target] += piece.num_bytes
    return PlanCost(
        pieces=len(plan.pieces),
        copies=sum(len(piece.copies) for piece in plan.pieces),
        payload_bytes=plan.payload_bytes,
        floor_bytes=floor_bytes(engine),
        by_link=dict(sorted(by_link.items())),
        by_source=by_source,
        by_target=by_target,
        largest_piece_bytes=max((piece.num_bytes for piece in plan.pieces), default=0),
    )


def floor_bytes(engine: Sequence[RankLayout]) -> int:
    """Bytes of everything that the engine ranks compute with, each rank counted for itself."""
    total = 0
    for layout in engine:
        item = {buffer.name: item_bytes(buffer.dtype) for buffer in layout.buffers}
        total += sum(shard.box.volume * item[shard.buffer] for shard in layout.shards)
    return total
