"""What a plan says about completeness: who must have sent what before a unit, a rank or a version is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from megastream.layout.columns import Ints
from megastream.plan.types import Pieces, Plan


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
    pieces = plan.pieces
    needs: dict[str, set[tuple[int, str]]] = {unit: set() for unit in plan.units}
    for unit, source, buffer in zip(pieces.unit.tolist(), pieces.source.tolist(), pieces.buffer.tolist(), strict=True):
        needs[pieces.units[unit]].add((source, pieces.buffers[buffer]))
    return {unit: tuple(sorted(pairs)) for unit, pairs in needs.items()}


def source_totals(plan: Plan, pulled: Mapping[int, Collection[str]] = MappingProxyType({})) -> dict[int, Totals]:
    """What every trainer rank emits per version; ranks that emit nothing are listed with zeros. Without the units that
    each engine rank pulls."""
    pieces = plan.pieces
    counted = np.ones(len(pieces), dtype=bool)
    for target, units in pulled.items():
        numbers = [number for number, unit in enumerate(pieces.units) if unit in units]
        counted &= (pieces.target != target) | ~np.isin(pieces.unit, numbers)
    return _totals(pieces, pieces.source, plan.num_trainer_ranks, counted)


def target_totals(plan: Plan) -> dict[int, Totals]:
    """What every engine rank receives per version."""
    return _totals(plan.pieces, plan.pieces.target, plan.num_engine_ranks)


def _totals(pieces: Pieces, ranks: Ints, num_ranks: int, counted: Any = slice(None)) -> dict[int, Totals]:
    ranks = ranks[counted]
    counts = np.bincount(ranks, minlength=num_ranks)
    elements, num_bytes = (
        np.bincount(ranks, each[counted], num_ranks) for each in (pieces.num_elements, pieces.num_bytes)
    )
    columns = (column.astype(np.int64).tolist() for column in (counts, elements, num_bytes))
    return {rank: Totals(*row) for rank, row in enumerate(zip(*columns, strict=True))}
