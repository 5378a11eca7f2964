"""The trainer's side: from Megatron's parameters to shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeVar

from megastream.layout.box import Box
from megastream.layout.mesh import coords_cut
from megastream.layout.naming import Entry, Names
from megastream.layout.pack import flat_boxes
from megastream.layout.pattern import Pattern, Patterns
from megastream.layout.rules import RULES, Cut, Fused, Placed
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec

Ownership = Literal["replica", "slice"]
"""`replica`: every data-parallel rank holds final bytes (after the parameter all-gather). `slice`: only the part of a
buffer that a rank's distributed optimizer steps (before it)."""

ShapeT = TypeVar("ShapeT")


@dataclass(frozen=True, slots=True)
class TrainerParam:
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
) -> RankLayout:
    """What one trainer rank holds. `coords` has every axis and its size: tp, tp_size, etp, etp_size, pp, ep, ...

    `buffers` come in the order in which they become final; the plan emits in that order. With ownership `slice`,
    `owned` gives per buffer the flat range [start, stop) that this rank steps; buffers without a range hold nothing.
    ValueError names a parameter without a rule, of the wrong shape, outside its buffer, or given twice. `patterns`:
    whoever describes several ranks of this model shares them.
    """
    if ownership == "slice" and owned is None:
        raise ValueError(f"trainer rank {rank}: ownership slice needs the owned range of every buffer")
    windows = owned if ownership == "slice" else None
    specs = {buffer.name: buffer for buffer in buffers}
    tensors: dict[str, TensorSpec] = {}
    shards: list[Shard] = []
    seen: set[str] = set()
    patterns = patterns or Patterns(family, shape)
    cuts = coords_cut(coords, "tp"), coords_cut(coords, "etp")
    for param in params:
        if param.name in seen:
            raise ValueError(f"trainer rank {rank}: parameter {param.name} is given twice")
        seen.add(param.name)
        pattern, specs_of = _place(patterns, param, cuts, rank)
        _check_inside(param, specs, rank)
        for part in pattern.parts:
            tensors[specs_of[part.index].name] = specs_of[part.index]
        window = _window(param, pattern.grid, windows)
        kept = pattern if window is None else pattern.inside(window)
        shards += kept.shards(specs_of, rank=rank, buffer=param.buffer, base=param.offset)
    return RankLayout(
        side="trainer",
        rank=rank,
        world_size=world_size,
        coords=dict(coords),
        tensors=tuple(tensors.values()),
        buffers=tuple(buffers),
        shards=tuple(shards),
        notes={"ownership": ownership},
    )


def place_trainer_param(entry: Entry, coords: Mapping[str, int], padded_rows: int = 0) -> Placed:
    """The shape and regions of a parameter on the rank at `coords`; `padded_rows` as in `Fused`."""
    cut = coords_cut(coords, "etp" if entry.kind == "expert" else "tp")
    return RULES[entry.rule](Fused(entry.tensors, entry.head_dim, padded_rows, entry.expert), cut)


def _place(
    patterns: Patterns[ShapeT], param: TrainerParam, cuts: tuple[Cut, Cut], rank: int
) -> tuple[Pattern, Sequence[TensorSpec]]:
    padded = 0
    if patterns.trainer_entry(param.name).rule in ("vocab", "latent"):
        padded = param.shape[0] * cuts[0].size
    pattern, tensors = patterns.trainer(param.name, *cuts, padded)
    if pattern.shape != param.shape:
        raise ValueError(f"trainer rank {rank}: {param.name} has shape {param.shape}, the table gives {pattern.shape}")
    return pattern, tensors


def _check_inside(param: TrainerParam, buffers: Mapping[str, BufferSpec], rank: int) -> None:
    if param.buffer not in buffers:
        raise ValueError(f"trainer rank {rank}: {param.name} lies in buffer {param.buffer}, which is not described")
    size, end = buffers[param.buffer].num_elements, param.offset + prod(param.shape)
    if param.offset < 0 or end > size:
        raise ValueError(
            f"trainer rank {rank}: {param.name} takes [{param.offset}, {end}) of buffer {param.buffer}, "
            f"which has {size} elements"
        )


def _window(
    param: TrainerParam, grid: tuple[int, ...], owned: Mapping[str, tuple[int, int]] | None
) -> tuple[Box, ...] | None:
    """The boxes of the parameter, in coordinates of its grid, that this rank owns; None: all of it."""
    if owned is None:
        return None
    size = prod(param.shape)
    start, stop = owned.get(param.buffer, (0, 0))
    lo, hi = max(start - param.offset, 0), min(stop - param.offset, size)
    return flat_boxes(grid, lo, hi) if lo < hi else ()
