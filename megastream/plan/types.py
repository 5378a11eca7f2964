"""The plan as plain data: units, copies, pieces. Both sides build it from the same layouts and compare digests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, overload

import msgspec
import numpy as np

from megastream.layout.columns import Ints

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


class Copy(msgspec.Struct, frozen=True, gc=False):
    """One intersected pair of shards. `shape` is common; offsets and strides count elements of each side's buffer."""

    tensor: str
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_buffer: str
    target_offset: int
    target_strides: tuple[int, ...]


class Piece(msgspec.Struct, frozen=True, gc=False):
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


class Pieces(Sequence[Piece]):
    """The pieces of a plan, in its order. As columns too, one number per piece: whoever counts needs no `Piece`."""

    source: Ints
    """Trainer rank."""
    target: Ints
    """Engine rank."""
    buffer: Ints
    """Source buffer, as a number in `buffers`."""
    unit: Ints
    """As a number in `units`."""
    num_elements: Ints
    num_bytes: Ints
    num_copies: Ints
    buffers: tuple[str, ...]
    units: tuple[str, ...]

    @abstractmethod
    def take(self, seqs: Ints) -> tuple[Piece, ...]:
        """The pieces with these numbers."""


class Listed(Pieces):
    """Pieces that exist already."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = tuple(pieces)
        self.source, self.target, self.num_elements, self.num_bytes, self.num_copies = (
            np.array([numbers[column] for numbers in map(_numbers, self._pieces)], dtype=np.int64)
            for column in range(5)
        )
        self.buffers = tuple(dict.fromkeys(piece.source_buffer for piece in self._pieces))
        self.units = tuple(dict.fromkeys(piece.unit for piece in self._pieces))
        self.buffer = np.array([self.buffers.index(piece.source_buffer) for piece in self._pieces], dtype=np.int64)
        self.unit = np.array([self.units.index(piece.unit) for piece in self._pieces], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, index: int | slice) -> Piece | tuple[Piece, ...]:
        return self._pieces[index]

    def take(self, seqs: Ints) -> tuple[Piece, ...]:
        return tuple(self._pieces[seq] for seq in seqs.tolist())


def _numbers(piece: Piece) -> tuple[int, int, int, int, int]:
    return piece.source, piece.target, piece.num_elements, piece.num_bytes, len(piece.copies)


class ByRank(Mapping[int, tuple[Piece, ...]]):
    """The pieces of each rank that has any, in plan order; made when a rank's are asked for."""

    def __init__(self, pieces: Pieces, ranks: Ints) -> None:
        self._pieces, self._ranks = pieces, ranks
        self._made: dict[int, tuple[Piece, ...]] = {}

    def __getitem__(self, rank: int) -> tuple[Piece, ...]:
        if rank not in self._made:
            seqs = np.flatnonzero(self._ranks == rank)
            if not len(seqs):
                raise KeyError(rank)
            self._made[rank] = self._pieces.take(seqs)
        return self._made[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(np.unique(self._ranks).tolist())

    def __len__(self) -> int:
        return len(np.unique(self._ranks))


@dataclass(frozen=True)
class Plan:
    """All copies between two layouts, cut into pieces. `digest` covers everything that both ends must agree on."""

    digest: str
    kind: str
    num_trainer_ranks: int
    num_engine_ranks: int
    pieces: Pieces = field(compare=False)
    units: tuple[str, ...]
    elements: dict[tuple[str, int], int] = field(repr=False)
    """Elements that (unit, engine rank) must receive before the unit is sealed there."""
    tensors: dict[int, int] = field(repr=False)
    """Number of engine buffers written on each engine rank."""
    unused: dict[int, tuple[str, ...]] = field(repr=False)
    """Engine buffers that exist but are never computed with; they get no bytes."""

    @cached_property
    def by_source(self) -> ByRank:
        """Pieces that each trainer rank sends, in plan order."""
        return ByRank(self.pieces, self.pieces.source)

    @cached_property
    def by_target(self) -> ByRank:
        """Pieces that each engine rank receives, in plan order."""
        return ByRank(self.pieces, self.pieces.target)

    @cached_property
    def closing_buffers(self) -> dict[tuple[str, int], str]:
        """The buffer that makes a unit final on a trainer rank that sends part of it: (unit, source rank) -> buffer.

        Pieces of a rank come in the order in which its buffers become final, so it is that of the unit's last piece.
        That is the order of the backward: what `speculative` makes again, and what later stages step behind theirs on a
        CPU, comes in another one.
        """
        pieces = self.pieces
        rows = zip(pieces.unit.tolist(), pieces.source.tolist(), pieces.buffer.tolist(), strict=True)
        return {(pieces.units[unit], source): pieces.buffers[buffer] for unit, source, buffer in rows}

    @property
    def payload_bytes(self) -> int:
        return int(self.pieces.num_bytes.sum())
