"""Builds a plan from two layouts: check, join, cut, prove, and put the digest on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from megastream.families.types import Place
from megastream.layout.shard import RankLayout, Side
from megastream.plan.check import check_layouts
from megastream.plan.coverage import prove
from megastream.plan.digest import plan_digest
from megastream.plan.pieces import PieceTable
from megastream.plan.reshard import reshard
from megastream.plan.schedule import schedule
from megastream.plan.types import Plan
from megastream.plan.unit import Units


class Places(Protocol):
    """What a plan needs of a family (see `megastream.families.Family`)."""

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> Callable[[str], Place]: ...

    def places(self, names: Iterable[str]) -> list[Place]: ...


def build_plan(
    trainer: Sequence[RankLayout],
    engine: Sequence[RankLayout],
    family: Places,
    *,
    kind: str,
    piece_bytes: int,
    experts_per_unit: int,
    finality: str,
    own: tuple[Side, int] | None = None,
    overlay: bool = False,
) -> Plan:
    """The plan between two layouts; the same on every rank that builds it from equal layouts and options.

    Pure and local: no rank waits for another. With `own`, side and rank of who builds it, only the copies that this
    rank sends or receives are proved: every rank does so, and all compare digests. With `overlay` both sides describe
    some tensors only, and engine buffers may hold others beside them.

    ValueError names the tensor, the rank and the numbers of whatever cannot be planned; CoverageError (one of them)
    means that the planner itself is wrong.
    """
    trainer = sorted(trainer, key=lambda layout: layout.rank)
    engine = sorted(engine, key=lambda layout: layout.rank)
    both = check_layouts(trainer, engine, family.place, overlay=overlay)
    places = family.places(spec.name for spec in both.tensors)
    moves = reshard(both, Units(both, places, experts_per_unit))
    pieces = schedule(moves, both, piece_bytes)
    prove(pieces, own)
    options: dict[str, str | int] = {
        "family": family.name,
        "kind": kind,
        "piece_bytes": piece_bytes,
        "experts_per_unit": experts_per_unit,
        "finality": finality,
    }
    if overlay:
        options["overlay"] = 1
    used = set(pieces.unit.tolist())
    return Plan(
        digest=plan_digest(pieces, options),
        kind=kind,
        num_trainer_ranks=len(trainer),
        num_engine_ranks=len(engine),
        pieces=pieces,
        units=tuple(unit for number, unit in enumerate(pieces.units) if number in used),
        elements=_elements(pieces),
        tensors=_num_tensors(pieces, len(engine)),
        unused={layout.rank: layout.unused for layout in engine},
    )


def _elements(pieces: PieceTable) -> dict[tuple[str, int], int]:
    num_targets = len(pieces.tables.target.layouts)
    keys, inverse = np.unique(pieces.unit * num_targets + pieces.target, return_inverse=True)
    sums = np.bincount(inverse, pieces.num_elements).astype(np.int64)
    return {
        (pieces.units[key // num_targets], key % num_targets): elements
        for key, elements in zip(keys.tolist(), sums.tolist(), strict=True)
    }


def _num_tensors(pieces: PieceTable, num_ranks: int) -> dict[int, int]:
    written = pieces.tables.target.buffer_rank[np.unique(pieces.copies.target_buffer)]
    return dict(enumerate(np.bincount(written, minlength=num_ranks).tolist()))
