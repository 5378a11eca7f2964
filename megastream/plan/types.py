"""The plan as plain data: units, copies, pieces. Both sides build it from the same layouts and compare digests."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Transform = Literal["none", "cast"]


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """The smallest set that is tracked and committed together.

    Text forms: `s1.l17.dense`, `s1.l17.e32:40` (half-open), `s1.l17.late`, `s0.embed`, `s1.norm`, `s1.head`.
    """

    stage: int
    layer: int | None
    part: str

    def __str__(self) -> str:
        return f"s{self.stage}.{self.part}" if self.layer is None else f"s{self.stage}.l{self.layer}.{self.part}"


@dataclass(frozen=True, slots=True)
class Copy:
    """One intersected pair of shards. `shape` is common; offsets and strides count elements of each side's buffer."""

    tensor: str
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_buffer: str
    target_offset: int
    target_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One packed message: copies of one (source rank, source buffer, unit, target rank), laid one behind the other.

    `seq` is its index in the plan. Each copy is packed row-major in its own shape, so the payload has
    `num_elements * itemsize(dtype)` bytes; `dtype` is the target's, and a cast happens at the source.
    """

    seq: int
    source: int
    target: int
    source_buffer: str
    unit: str
    dtype: str
    transform: Transform
    num_elements: int
    num_bytes: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Plan:
    """All copies between two layouts, cut into pieces. `digest` covers everything that both ends must agree on."""

    digest: str
    kind: str
    num_trainer_ranks: int
    num_engine_ranks: int
    pieces: tuple[Piece, ...]
    units: tuple[str, ...]
    elements: dict[tuple[str, int], int] = field(repr=False)
    """Elements that (unit, engine rank) must receive before the unit is sealed there."""
    tensors: dict[int, int] = field(repr=False)
    """Number of engine buffers written on each engine rank."""
    unused: dict[int, tuple[str, ...]] = field(repr=False)
    """Engine buffers that exist but are never computed with; they get no bytes."""

    @cached_property
    def by_source(self) -> dict[int, tuple[Piece, ...]]:
        """Pieces that each trainer rank sends, in plan order."""
        return _group(self.pieces, "source")

    @cached_property
    def by_target(self) -> dict[int, tuple[Piece, ...]]:
        """Pieces that each engine rank receives, in plan order."""
        return _group(self.pieces, "target")

    @cached_property
    def closing_buffers(self) -> dict[tuple[str, int], str]:
        """The buffer that makes a unit final on a trainer rank that sends part of it: (unit, source rank) -> buffer.

        Pieces of a rank come in the order in which its buffers become final, so it is that of the unit's last piece.
        """
        return {(piece.unit, piece.source): piece.source_buffer for piece in self.pieces}

    @property
    def payload_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def _group(pieces: tuple[Piece, ...], key: Literal["source", "target"]) -> dict[int, tuple[Piece, ...]]:
    groups: dict[int, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(getattr(piece, key), []).append(piece)
    return {rank: tuple(group) for rank, group in groups.items()}
