"""What a family has worked out for one shape, so that it is asked once and not for each layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from megastream.families.types import Row
from megastream.layout.naming import Entry
from megastream.layout.shard import TensorSpec


class Match(msgspec.Struct, frozen=True, gc=False):
    row: Row
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Sized:
    """A row in a model of one shape: name, shape and parts of each of its tensors; `exists`: the model has it."""

    exists: bool
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str
    parts: tuple[tuple[int, ...], ...]


class Alike(msgspec.Struct, frozen=True, gc=False):
    """What a name of layer `layer` stands for, and the names of its tensors around the number of their layer."""

    entry: Entry
    layer: int | None
    names: tuple[tuple[str, ...], ...]

    def at(self, layer: int) -> Entry:
        """What the same name of another layer stands for."""
        mine = self.entry
        tensors = [
            TensorSpec(str(layer).join(around), spec.shape, spec.dtype)
            for around, spec in zip(self.names, mine.tensors, strict=True)
        ]
        return Entry(mine.kind, mine.rule, tuple(tensors), mine.head_dim, mine.dtype, mine.expert, mine.parts)


@dataclass(frozen=True, slots=True)
class Known:
    """What has been worked out for a shape from these rows: by the `id` of a row, and by a name without its layer."""

    rows: tuple[Row, ...]
    sized: dict[int, Sized] = field(default_factory=dict)
    entries: dict[tuple[str | int | None, ...], Alike] = field(default_factory=dict)
