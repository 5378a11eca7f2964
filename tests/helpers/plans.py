"""A small plan made by hand, for state machines that only count."""

from __future__ import annotations

from typing import Any

from megastream.plan.types import Copy, Listed, Piece, Plan
from megastream.protocol.header import PieceHeader
from megastream.protocol.records import Attach
from megastream.protocol.terms import Terms

TERMS = Terms(run_id="run", attachment="i1", incarnation=1, kind="stream", plan_digest="digest", base_version=0)


def small_plan(sources: int = 2, targets: int = 2, pieces_per_lane: int = 2) -> Plan:
    """Every source sends `pieces_per_lane` pieces of 1, 2, ... elements to every target, over two units."""
    pieces: list[Piece] = []
    elements: dict[tuple[str, int], int] = {}
    for source in range(sources):
        for target in range(targets):
            for index in range(pieces_per_lane):
                unit, n, seq = f"s0.l{index % 2}.dense", index + 1, len(pieces)
                copy = Copy(f"t{seq}", (n,), 0, (1,), "w", 10 * seq, (1,))
                pieces.append(Piece(seq, source, target, "bucket", unit, "bfloat16", "none", n, 2 * n, (copy,)))
                elements[unit, target] = elements.get((unit, target), 0) + n
    return Plan(
        digest="digest",
        kind="stream",
        num_trainer_ranks=sources,
        num_engine_ranks=targets,
        pieces=Listed(pieces),
        units=tuple(sorted({piece.unit for piece in pieces})),
        elements=elements,
        tensors={target: 1 for target in range(targets)},
        unused={},
    )


def header_of(piece: Piece, version: int, attempt: int = 0, terms: Terms = TERMS, checksum: int = 0) -> PieceHeader:
    return PieceHeader(
        kind="piece",
        run_id=terms.run_id,
        incarnation=terms.incarnation,
        attachment=terms.attachment,
        version=version,
        attempt=attempt,
        unit=piece.unit,
        plan_digest=terms.plan_digest,
        source=piece.source,
        target=piece.target,
        seq=piece.seq,
        num_bytes=piece.num_bytes,
        checksum=checksum,
    )


def attach_record(incarnation: int = 1, base: int = 0, **changes: Any) -> Attach:
    fields = dict(kind="stream", family="qwen3_moe", finality="pipelined", piece_bytes=1, experts_per_unit=1)
    fields = {**fields, "engine": "e", "trainer_world_size": 1, "train_step": 0, **changes}
    name = fields.pop("attachment", f"i{incarnation}")
    return Attach(attachment=name, incarnation=incarnation, base_version=base, **fields)


PARTS = {"s0.embed": (0,), "s0.l0.e0:2": (0, 1), "s1.l1.dense": (1,), "s1.l1.e0:2": (0, 1)}
"""Units of `plan_of_parts`, and the engine ranks that hold each."""


def plan_of_parts() -> Plan:
    """Two trainer ranks, one per stage, and two engine ranks; each unit comes in two pieces per rank that holds it."""
    pieces: list[Piece] = []
    for unit, targets in PARTS.items():
        for target in targets:
            for _ in range(2):
                seq, source = len(pieces), int(unit[1])
                copy = Copy(f"t{seq}", (3,), 0, (1,), unit, 0, (1,))
                pieces.append(Piece(seq, source, target, "bucket", unit, "bfloat16", "none", 3, 6, (copy,)))
    return Plan(
        digest="digest",
        kind="stream",
        num_trainer_ranks=2,
        num_engine_ranks=2,
        pieces=Listed(pieces),
        units=tuple(PARTS),
        elements={(unit, target): 6 for unit, targets in PARTS.items() for target in targets},
        tensors={0: 1, 1: 1},
        unused={},
    )
