"""All pieces of a plan as columns. A `Piece` is made when somebody asks for it: a rank needs its own ones only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np

from megastream.layout.columns import Ints, Numbered, expand, ints
from megastream.plan.table import Tables
from megastream.plan.types import Copy, Piece, Pieces, Transform


@dataclass(frozen=True)
class CopyTable:
    """Row for row a copy; those of one piece stand together. `tensor`, `target_buffer` and the strides count in the
    plan's tables (-1: a name that they do not have), `shape` in `shapes`."""

    tensor: Ints
    shape: Ints
    source_offset: Ints
    source_strides: Ints
    target_buffer: Ints
    target_offset: Ints
    target_strides: Ints
    shapes: tuple[tuple[int, ...], ...]

    @property
    def columns(self) -> tuple[Ints, ...]:
        source = self.source_offset, self.source_strides
        return (self.tensor, self.shape, *source, self.target_buffer, self.target_offset, self.target_strides)


@dataclass(frozen=True, eq=False)
class PieceTable(Pieces):
    """Row for row a piece; `first[i]` to `first[i + 1]` are its copies. `buffer` counts in the source table's."""

    tables: Tables = field(repr=False)
    copies: CopyTable = field(repr=False)
    first: Ints
    buffer: Ints
    target: Ints
    unit: Ints
    dtype: Ints
    num_elements: Ints
    num_bytes: Ints
    units: tuple[str, ...]
    dtypes: tuple[str, ...]
    _made: dict[int, Piece] = field(default_factory=dict, repr=False)

    @cached_property
    def source(self) -> Ints:  # type: ignore[override]
        found: Ints = self.tables.source.buffer_rank[self.buffer]
        return found

    @cached_property
    def num_copies(self) -> Ints:  # type: ignore[override]
        return np.diff(self.first)

    @cached_property
    def buffers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(spec.name for spec in self.tables.source.buffers)

    @property
    def columns(self) -> tuple[Ints, ...]:
        """All that the pieces say, as numbers."""
        return (self.first, self.buffer, self.target, self.unit, self.dtype, self.num_elements, *self.copies.columns)

    def __len__(self) -> int:
        return len(self.buffer)

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Piece, ...]: ...
    def __getitem__(self, index: int | slice) -> Piece | tuple[Piece, ...]:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        seq = range(len(self))[index]
        return self._made[seq] if seq in self._made else self.take(ints([seq]))[0]

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.take(np.arange(len(self))))

    def take(self, seqs: Ints) -> tuple[Piece, ...]:
        new = ints([seq for seq in seqs.tolist() if seq not in self._made])
        copies, sources, counts = self._copies(new), self.tables.source.buffers, self.num_copies[new]
        transforms: dict[bool, Transform] = {True: "none", False: "cast"}
        begins = np.cumsum(counts) - counts
        columns = (self.source, self.target, self.buffer, self.unit, self.dtype, self.num_elements, self.num_bytes)
        numbers = (new, *(column[new] for column in columns), begins, begins + counts)
        for seq, source, target, buffer, unit, dtype, num_elements, num_bytes, begin, end in zip(
            *map(np.ndarray.tolist, numbers), strict=True
        ):
            spec, name = sources[buffer], self.dtypes[dtype]
            self._made[seq] = Piece(
                seq=seq,
                source=source,
                target=target,
                source_buffer=spec.name,
                unit=self.units[unit],
                dtype=name,
                transform=transforms[spec.dtype == name],
                num_elements=num_elements,
                num_bytes=num_bytes,
                copies=copies[begin:end],
            )
        return tuple([self._made[seq] for seq in seqs.tolist()])

    def _copies(self, seqs: Ints) -> tuple[Copy, ...]:
        """The copies of these pieces, one behind the other."""
        _, rows = expand(self.first[seqs], self.num_copies[seqs])
        tensor, shape, source, source_strides, buffer, target, target_strides = (
            column[rows].tolist() for column in self.copies.columns
        )
        both = self.tables
        strides = both.geometry.strides
        return tuple(
            map(
                Copy,
                [both.tensors[number].name for number in tensor],
                map(self.copies.shapes.__getitem__, shape),
                source,
                map(strides.__getitem__, source_strides),
                [both.target.buffers[number].name for number in buffer],
                target,
                map(strides.__getitem__, target_strides),
            )
        )


def piece_table(pieces: Iterable[Piece], both: Tables) -> PieceTable:
    """Pieces as columns; what the tables do not have becomes -1."""
    listed = list(pieces)
    tensors = {spec.name: number for number, spec in enumerate(both.tensors)}
    strides = {steps: number for number, steps in enumerate(both.geometry.strides)}
    shapes = Numbered[tuple[int, ...]]()
    sources, targets = both.source.buffer_numbers(), both.target.buffer_numbers()
    copies = [(piece, copy) for piece in listed for copy in piece.copies]
    units, dtypes = ([*dict.fromkeys(names)] for names in ((p.unit for p in listed), (p.dtype for p in listed)))
    return PieceTable(
        tables=both,
        copies=CopyTable(
            tensor=ints([tensors.get(copy.tensor, -1) for _, copy in copies]),
            shape=ints(shapes.numbers([copy.shape for _, copy in copies])),
            source_offset=ints([copy.source_offset for _, copy in copies]),
            source_strides=ints([strides.get(copy.source_strides, -1) for _, copy in copies]),
            target_buffer=ints([targets.get((piece.target, copy.target_buffer), -1) for piece, copy in copies]),
            target_offset=ints([copy.target_offset for _, copy in copies]),
            target_strides=ints([strides.get(copy.target_strides, -1) for _, copy in copies]),
            shapes=tuple(shapes.items),
        ),
        first=np.cumsum([0, *(len(piece.copies) for piece in listed)]),
        buffer=ints([sources.get((piece.source, piece.source_buffer), -1) for piece in listed]),
        target=ints([piece.target for piece in listed]),
        unit=ints([units.index(piece.unit) for piece in listed]),
        dtype=ints([dtypes.index(piece.dtype) for piece in listed]),
        num_elements=ints([piece.num_elements for piece in listed]),
        num_bytes=ints([piece.num_bytes for piece in listed]),
        units=tuple(units),
        dtypes=tuple(dtypes),
        _made=dict(enumerate(listed)),
    )
