"""What a plan says about completeness: who must have sent what before a unit, a rank or a version is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megastream.plan.types import Piece, Plan


@dataclass(frozen=True, slots=True)
class Totals:
    """What one rank sends or receives per version."""

    pieces: int = 0
    elements: int = 0
    payload_bytes: int = 0


def buffers_of_units(plan: Plan) -> dict[str, tuple[tuple[int, str], ...]]:
    """Per unit the (trainer rank, buffer) pairs that must be final before it is complete, sorted.

    Buckets straddle layers: a unit can need several, and one can serve several units.
    """
    needs: dict[str, set[tuple[int, str]]] = {unit: set() for unit in plan.units}
    for piece in plan.pieces:
        needs[piece.unit].add((piece.source, piece.source_buffer))
    return {unit: tuple(sorted(pairs)) for unit, pairs in needs.items()}


def source_totals(plan: Plan) -> dict[int, Totals]:
    """What every trainer rank emits per version; ranks that emit nothing are listed with zeros."""
    return {rank: _total(plan.by_source, rank) for rank in range(plan.num_trainer_ranks)}


def target_totals(plan: Plan) -> dict[int, Totals]:
    """What every engine rank receives per version."""
    return {rank: _total(plan.by_target, rank) for rank in range(plan.num_engine_ranks)}


def _total(groups: Mapping[int, tuple[Piece, ...]], rank: int) -> Totals:
    pieces = groups.get(rank, ())
    return Totals(
        pieces=len(pieces),
        elements=sum(piece.num_elements for piece in pieces),
        payload_bytes=sum(piece.num_bytes for piece in pieces),
    )
