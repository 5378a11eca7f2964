"""Units: which of them there are, and which one a tensor's bytes belong to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from megastream.families.types import Place
from megastream.layout.columns import Ints, Numbered, expand, ints
from megastream.layout.shard import RankLayout
from megastream.plan.table import Tables
from megastream.plan.types import Unit

PlaceOf = Callable[[str], Place]

_EXPERTS = re.compile(r"s[0-9]+\.l([0-9]+)\.e([0-9]+):([0-9]+)")
_OUTER_ORDER = {"embed": -1.0, "norm": inf, "head": inf}


class Units:
    """Maps (trainer stage, tensor, expert) to units; `all` holds those that were asked for, by number.

    Expert units are ranges of at most `experts_per_unit` consecutive global experts, and never reach across what one
    trainer expert-parallel rank owns: otherwise a unit would wait for two ranks.
    """

    def __init__(self, both: Tables, places: Sequence[Place], experts_per_unit: int) -> None:
        if experts_per_unit < 1:
            raise ValueError(f"experts_per_unit is {experts_per_unit}; it must be at least 1")
        self.all: list[Unit] = []
        self._numbers: dict[Unit, int] = {}
        self._places = _places(places)
        self._ranges = _ranges(both, self._places, experts_per_unit)

    def numbers(self, stage: Ints, tensor: Ints, first: Ints) -> Ints:
        """The unit of each row of bytes from trainer stage `stage`. `first`: where they begin in dim 0, which counts
        experts if the tensor holds all of a layer."""
        places, ranges = self._places, self._ranges
        group, own = places.group[tensor], places.expert[tensor]
        expert = np.where(places.stacked[tensor], first, own)
        start, stop = np.zeros((2, len(tensor)), dtype=np.int64)
        rows = np.flatnonzero(expert >= 0)
        at = np.searchsorted(ranges.keys, ranges.key(stage[rows], group[rows], expert[rows]))
        start[rows], stop[rows] = ranges.start[at], ranges.stop[at]
        most = int(stop.max(initial=0)) + 1
        keys = ((stage * len(places.groups) + group) * most + start) * most + stop
        _, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
        found = zip(*(column[firsts].tolist() for column in (stage, group, start, stop)), strict=True)
        return ints(self._number(*each) for each in found)[inverse]

    def _number(self, stage: int, group: int, start: int, stop: int) -> int:
        layer, kind = self._places.groups[group]
        unit = Unit(stage, layer, f"e{start}:{stop}" if kind == "expert" else kind)
        number = self._numbers.setdefault(unit, len(self.all))
        if number == len(self.all):
            self.all.append(unit)
        return number


def unit_order(unit: Unit) -> tuple[int, float, int, int, str]:
    """Sort key: by stage, embedding first, then layers (dense, experts by number, late), then norm and head."""
    layer = _OUTER_ORDER.get(unit.part, inf) if unit.layer is None else float(unit.layer)
    first, _, stop = unit.part[1:].partition(":")
    if stop:
        return (unit.stage, layer, 1, int(first), unit.part)
    return (unit.stage, layer, 0 if unit.part == "dense" else 2, 0, unit.part)


def stage_of(layout: RankLayout) -> int:
    """Pipeline stage of a trainer rank."""
    return layout.coords.get("pp", 0)


@dataclass(frozen=True)
class _Places:
    """Places as columns, by tensor. `group` counts in `groups`, (layer, kind); `expert` is -1 where a tensor has none
    or, as `stacked` says, holds all of its layer."""

    group: Ints
    expert: Ints
    stacked: npt.NDArray[np.bool_]
    groups: tuple[tuple[int | None, str], ...]


@dataclass(frozen=True)
class _Ranges:
    """The range [start, stop) of experts that (stage, group, expert) belongs to; `keys` ascend."""

    keys: Ints
    start: Ints
    stop: Ints
    num_groups: int
    num_experts: int

    def key(self, stage: Ints, group: Ints, expert: Ints) -> Ints:
        return (stage * self.num_groups + group) * self.num_experts + expert


def _places(places: Sequence[Place]) -> _Places:
    groups = Numbered[tuple[int | None, str]]()
    group = ints(groups.numbers([(place.layer, place.kind) for place in places]))
    expert = ints([-1 if place.expert is None else place.expert for place in places])
    is_expert = np.array([kind == "expert" for _, kind in groups.items], dtype=bool)[group]
    return _Places(group, np.where(is_expert, expert, -1), is_expert & (expert < 0), tuple(groups.items))


def _ranges(both: Tables, places: _Places, experts_per_unit: int) -> _Ranges:
    side, geometry = both.source, both.geometry
    names = Numbered[tuple[int, int]]()
    owner = ints(names.numbers((stage_of(layout), layout.coords.get("ep", 0)) for layout in side.layouts))[side.rank]
    stacked, expert = places.stacked[side.tensor], places.expert[side.tensor]
    held = np.flatnonzero(stacked | (expert >= 0))
    box = side.box[held]
    first = np.where(stacked[held], geometry.lo[0][box], expert[held])
    row, expert = expand(first, np.where(stacked[held], geometry.hi[0][box] - first, 1))
    most = int(expert.max(initial=0)) + 1
    keys = np.unique((owner[held] * len(places.groups) + places.group[side.tensor[held]])[row] * most + expert)
    whose, expert = keys // most, keys % most
    start, stop = _runs(whose, expert, experts_per_unit)
    stage = ints(stage for stage, _ in names.items)[whose // len(places.groups)]
    ranges = _Ranges(keys, start, stop, len(places.groups), most)
    keys = ranges.key(stage, whose % len(places.groups), expert)
    # An expert that two expert-parallel ranks own is in the range of the last one.
    order = np.argsort(keys, kind="stable")
    last = order[np.append(keys[order][1:] != keys[order][:-1], np.ones(min(len(keys), 1), dtype=bool))]
    return _Ranges(keys[last], start[last], stop[last], len(places.groups), most)


def _runs(whose: Ints, expert: Ints, longest: int) -> tuple[Ints, Ints]:
    """Cuts each owner's ascending experts into runs of consecutive ones, none longer than `longest`: [start, stop) of
    the run of each."""
    if not len(expert):
        return expert, expert
    breaks = np.append(True, (whose[1:] != whose[:-1]) | (expert[1:] != expert[:-1] + 1))
    first = np.flatnonzero(breaks)
    place = np.arange(len(expert)) - first[np.cumsum(breaks) - 1]
    begins = place % longest == 0
    first, run = np.flatnonzero(begins), np.cumsum(begins) - 1
    last = np.append(first[1:], len(expert)) - 1
    return expert[first][run], expert[last][run] + 1


def experts_of(unit: str) -> tuple[int, range] | None:
    """(layer, global experts) of an expert unit in its text form, e.g. `s1.l17.e32:40`; None for any other unit."""
    found = _EXPERTS.fullmatch(unit)
    return None if found is None else (int(found[1]), range(int(found[2]), int(found[3])))
