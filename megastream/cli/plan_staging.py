"""What `megastream plan` says about staging: what it takes of each engine rank, and what is left to be pulled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megastream.layout.columns import ints
from megastream.layout.pack import item_bytes
from megastream.plan.pieces import PieceTable
from megastream.plan.tiers import Placement, StagingBudget, bundles_of, place

STAGING_SETS = 2
"""Versions in staging at once, by default."""


@dataclass(frozen=True)
class Staging:
    """`set_bytes`: all buffers of each engine rank, once. `placements` by engine rank; none without a budget."""

    set_bytes: tuple[int, ...]
    num_sets: int
    budget: StagingBudget
    placements: dict[int, Placement]

    @property
    def peak_bytes(self) -> int:
        """Of the rank that takes most, without a budget."""
        return self.num_sets * max(self.set_bytes)

    @property
    def host_set_bytes(self) -> dict[int, int]:
        """What a commit brings from host memory, by engine rank."""
        return {rank: placement.host_bytes // self.num_sets for rank, placement in self.placements.items()}

    @property
    def pulled_bytes(self) -> dict[int, int]:
        """What a commit pulls from the trainer, by engine rank."""
        return {rank: placement.pulled_bytes for rank, placement in self.placements.items()}

    @property
    def fullest(self) -> tuple[int, int]:
        """Most bytes that a rank takes (on the device, in host memory)."""
        found = self.placements.values()
        return max(each.device_bytes for each in found), max(each.host_bytes for each in found)

    @property
    def shortages(self) -> tuple[str, ...]:
        """Why some ranks do not stage everything, rank by rank."""
        return tuple(
            f"engine rank {rank}: {placement.shortage}"
            for rank, placement in self.placements.items()
            if placement.shortage
        )

    def as_dict(self) -> dict[str, Any] | None:
        """For programs; None without a budget."""
        if not self.placements:
            return None
        return {
            "sets": self.num_sets,
            "device_bytes": self.budget.device_bytes,
            "host_bytes": self.budget.host_bytes,
            "ranks": {
                rank: {
                    "device_bytes": placement.device_bytes,
                    "host_bytes": placement.host_bytes,
                    "pulled_bytes": placement.pulled_bytes,
                    "short_bytes": placement.short_bytes,
                    "host_units": [unit for bundle in placement.host for unit in bundle.units],
                    "pulled_units": list(placement.pulled_units),
                }
                for rank, placement in self.placements.items()
            },
        }


def staging_of(pieces: PieceTable, budget: StagingBudget, num_sets: int) -> Staging:
    """What an engine works out for itself when a trainer attaches, for all of its ranks."""
    side = pieces.tables.target
    sizes = ints([spec.num_elements * item_bytes(spec.dtype) for spec in side.buffers])
    ranks = [layout.rank for layout in side.layouts]
    set_bytes = tuple(int(sizes[side.buffer_rank == rank].sum()) for rank in ranks)
    if not budget.is_given:
        return Staging(set_bytes, num_sets, budget, {})
    pairs = _pairs(pieces)
    by_rank = side.buffer_rank[pairs[1]]
    placements = {}
    for rank in ranks:
        mine = [(pieces.units[u], side.buffers[b].name) for u, b in pairs[:, by_rank == rank].T.tolist()]
        named = {side.buffers[b].name: int(sizes[b]) for b in np.flatnonzero(side.buffer_rank == rank).tolist()}
        placements[rank] = place(bundles_of(mine, named), budget, num_sets)
    return Staging(set_bytes, num_sets, budget, placements)


def _pairs(pieces: PieceTable) -> Any:
    """(unit, target buffer) of all copies, each pair once and in plan order, as two rows of numbers."""
    both = np.stack([np.repeat(pieces.unit, pieces.num_copies), pieces.copies.target_buffer])
    _, first = np.unique(both, axis=1, return_index=True)
    return both[:, np.sort(first)]
