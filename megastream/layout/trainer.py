"""The trainer's side: from Megatron's parameters to shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Generic, Literal, TypeVar

import msgspec

from megastream.layout.box import Box
from megastream.layout.columns import Parameters
from megastream.layout.mesh import coords_cut
from megastream.layout.naming import Entry, Names
from megastream.layout.pack import flat_boxes
from megastream.layout.pattern import Pattern, Patterns
from megastream.layout.placing import Cut, Placed
from megastream.layout.rules import RULES
from megastream.layout.shard import BufferSpec, RankLayout

Ownership = Literal["replica", "slice"]
"""`replica`: every data-parallel rank holds final bytes (after the parameter all-gather). `slice`: only the part of a
buffer that a rank's distributed optimizer steps (before it)."""

ShapeT = TypeVar("ShapeT")


class TrainerParam(msgspec.Struct, frozen=True, gc=False):
    """One contiguous row-major Megatron parameter, `shape` as it is on this rank.

    `name` is canonical: no `module.` prefix, global layer index, global expert index. `buffer` is the Megatron bucket
    that the parameter lies in, `offset` its first element there.
    """

    name: str
    shape: tuple[int, ...]
    buffer: str
    offset: int


def trainer_rank_layout(
    family: Names[ShapeT],
    shape: ShapeT,
    *,
    rank: int,
    world_size: int,
    coords: Mapping[str, int],
    params: Sequence[TrainerParam],
    buffers: Sequence[BufferSpec],
    ownership: Ownership = "replica",
    owned: Mapping[str, tuple[int, int]] | None = None,
    patterns: Patterns[ShapeT] | None = None,
    unused: Sequence[str] = (),
) -> RankLayout:
    """What one trainer rank holds. `coords` has every axis and its size: tp, tp_size, etp, etp_size, pp, ep, ...

    `buffers` come in the order in which they become final; the plan emits in that order. With ownership `slice`,
    `owned` gives per buffer the flat range [start, stop) that this rank steps; buffers without a range hold nothing.
    `unused` are parameters that no engine computes with: they are listed, and nothing is read from them.
    ValueError names a parameter without a rule, of the wrong shape, outside its buffer, or given twice. `patterns`:
    whoever describes several ranks of this model shares them.
    """
    patterns = patterns or Patterns(family, shape)
    held = TrainerParams(patterns, params, buffers, f"trainer rank {rank}")
    layout = held.layout(rank=rank, world_size=world_size, coords=coords, ownership=ownership, owned=owned)
    return replace(layout, unused=tuple(sorted(unused)))


class TrainerParams(Generic[ShapeT]):
    """The parameters of `trainer_rank_layout`. Ranks that hold the same ones, each cut in its way, share it.

    ValueError names `where`, and whatever is wrong with the parameters alone.
    """

    def __init__(
        self, patterns: Patterns[ShapeT], params: Sequence[TrainerParam], buffers: Sequence[BufferSpec], where: str
    ) -> None:
        self._patterns, self._params, self._buffers = patterns, params, tuple(buffers)
        _check_params(params, buffers, where)
        numbers = {buffer.name: number for number, buffer in enumerate(buffers)}
        found = [patterns.of_trainer(param.name) for param in params]
        self._held = Parameters(
            [(kind, param.shape) for param, (kind, _) in zip(params, found, strict=True)],
            [tensors for _, tensors in found],
            [numbers[param.buffer] for param in params],
            [param.offset for param in params],
        )

    def layout(
        self,
        *,
        rank: int,
        world_size: int,
        coords: Mapping[str, int],
        ownership: Ownership = "replica",
        owned: Mapping[str, tuple[int, int]] | None = None,
    ) -> RankLayout:
        """Of the rank at `coords`; arguments and errors as of `trainer_rank_layout`."""
        if ownership == "slice" and owned is None:
            raise ValueError(f"trainer rank {rank}: ownership slice needs the owned range of every buffer")
        cuts = coords_cut(coords, "tp"), coords_cut(coords, "etp")
        examples = [self._params[number] for number in self._held.examples]
        patterns = [_place(self._patterns, param, cuts, rank) for param in examples]
        kept = self._kept(cuts, owned) if ownership == "slice" and owned is not None else None
        shards = self._held.shards(rank, self._buffers, patterns, kept=kept)
        return RankLayout(
            side="trainer",
            rank=rank,
            world_size=world_size,
            coords=dict(coords),
            tensors=shards.tensors,
            buffers=self._buffers,
            shards=shards,
            notes={"ownership": ownership},
        )

    def _kept(self, cuts: tuple[Cut, Cut], owned: Mapping[str, tuple[int, int]]) -> list[Pattern]:
        """Of each parameter what the rank steps."""
        kept = []
        for param in self._params:
            pattern, _ = self._patterns.trainer(param.name, *cuts, _rows(param, cuts))
            kept.append(pattern.inside(_window(param, pattern.grid, owned)))
        return kept


def place_trainer_param(entry: Entry, coords: Mapping[str, int], padded_rows: int = 0) -> Placed:
    """The shape and regions of a parameter on the rank at `coords`; `padded_rows` as in `Fused`."""
    cut = coords_cut(coords, "etp" if entry.kind == "expert" else "tp")
    return RULES[entry.rule](entry.fused(padded_rows), cut)


def _place(patterns: Patterns[ShapeT], param: TrainerParam, cuts: tuple[Cut, Cut], rank: int) -> Pattern:
    pattern, _ = patterns.trainer(param.name, *cuts, _rows(param, cuts))
    if pattern.shape != param.shape:
        raise ValueError(f"trainer rank {rank}: {param.name} has shape {param.shape}, the table gives {pattern.shape}")
    return pattern


def _rows(param: TrainerParam, cuts: tuple[Cut, Cut]) -> int:
    """Rows of the parameter over all ranks."""
    return param.shape[0] * cuts[0].size if param.shape else 0


def _check_params(params: Sequence[TrainerParam], buffers: Sequence[BufferSpec], where: str) -> None:
    """Each is given once, and lies in a buffer that is described."""
    sizes = {buffer.name: buffer.num_elements for buffer in buffers}
    seen = set[str]()
    for param in params:
        if param.name in seen:
            raise ValueError(f"{where}: parameter {param.name} is given twice")
        seen.add(param.name)
        size = sizes.get(param.buffer)
        if size is None:
            raise ValueError(f"{where}: {param.name} lies in buffer {param.buffer}, which is not described")
        end = param.offset + prod(param.shape)
        if param.offset < 0 or end > size:
            raise ValueError(
                f"{where}: {param.name} takes [{param.offset}, {end}) of buffer {param.buffer}, "
                f"which has {size} elements"
            )


def _window(param: TrainerParam, grid: tuple[int, ...], owned: Mapping[str, tuple[int, int]]) -> tuple[Box, ...]:
    """The boxes of the parameter, in coordinates of its grid, that this rank owns."""
    start, stop = owned.get(param.buffer, (0, 0))
    lo, hi = max(start - param.offset, 0), min(stop - param.offset, prod(param.shape))
    return flat_boxes(grid, lo, hi) if lo < hi else ()
