"""Builds a plan from two layouts: check, join, cut, prove, and put the digest on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from megastream.families.types import Place
from megastream.layout.shard import RankLayout
from megastream.plan.check import check_layouts
from megastream.plan.coverage import prove_coverage
from megastream.plan.digest import plan_digest
from megastream.plan.reshard import reshard
from megastream.plan.schedule import schedule
from megastream.plan.types import Piece, Plan
from megastream.plan.unit import Units, unit_order


class Places(Protocol):
    """What a plan needs of a family (see `megastream.families.Family`)."""

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> Callable[[str], Place]: ...


def build_plan(
    trainer: Sequence[RankLayout],
    engine: Sequence[RankLayout],
    family: Places,
    *,
    kind: str,
    piece_bytes: int,
    experts_per_unit: int,
    finality: str,
) -> Plan:
    """The plan between two layouts; the same on every rank that builds it from equal layouts and options.

    Pure and local: no rank waits for another. ValueError names the tensor, the rank and the numbers of whatever
    cannot be planned; CoverageError (one of them) means that the planner itself is wrong.
    """
    trainer = sorted(trainer, key=lambda layout: layout.rank)
    engine = sorted(engine, key=lambda layout: layout.rank)
    place_of = lru_cache(maxsize=None)(family.place)
    check_layouts(trainer, engine, place_of)
    units = Units(trainer, place_of, experts_per_unit)
    moves = reshard(trainer, engine, units, place_of)
    pieces = schedule(moves, trainer, engine, piece_bytes)
    prove_coverage(pieces, trainer, engine)
    options: dict[str, str | int] = {
        "family": family.name,
        "kind": kind,
        "piece_bytes": piece_bytes,
        "experts_per_unit": experts_per_unit,
        "finality": finality,
    }
    return Plan(
        digest=plan_digest(trainer, engine, pieces, options),
        kind=kind,
        num_trainer_ranks=len(trainer),
        num_engine_ranks=len(engine),
        pieces=pieces,
        units=tuple(str(unit) for unit in sorted({move.unit for move in moves}, key=unit_order)),
        elements=_elements(pieces),
        tensors=_num_tensors(pieces, len(engine)),
        unused={layout.rank: layout.unused for layout in engine},
    )


def _elements(pieces: Sequence[Piece]) -> dict[tuple[str, int], int]:
    elements: dict[tuple[str, int], int] = {}
    for piece in pieces:
        key = piece.unit, piece.target
        elements[key] = elements.get(key, 0) + piece.num_elements
    return elements


def _num_tensors(pieces: Sequence[Piece], num_ranks: int) -> dict[int, int]:
    written: dict[int, set[str]] = {rank: set() for rank in range(num_ranks)}
    for piece in pieces:
        written[piece.target].update(copy.target_buffer for copy in piece.copies)
    return {rank: len(names) for rank, names in written.items()}
