"""Units: which of them there are, and which one a tensor's bytes belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from megastream.families.types import Place
from megastream.layout.shard import RankLayout
from megastream.plan.table import Numbered, Tables, ints
from megastream.plan.types import Unit

PlaceOf = Callable[[str], Place]

_OUTER_ORDER = {"embed": -1.0, "norm": inf, "head": inf}


class Units:
    """Maps (trainer stage, place) to units.

    Expert units are ranges of at most `experts_per_unit` consecutive global experts, and never reach across what one
    trainer expert-parallel rank owns: otherwise a unit would wait for two ranks.
    """

    def __init__(self, both: Tables, places: Sequence[Place], experts_per_unit: int) -> None:
        if experts_per_unit < 1:
            raise ValueError(f"experts_per_unit is {experts_per_unit}; it must be at least 1")
        self._ranges = _expert_ranges(both, places, experts_per_unit)

    def unit(self, stage: int, place: Place, expert: int) -> Unit:
        """The unit of bytes from trainer stage `stage`; `expert`: their first one, if the tensor holds all experts."""
        if place.kind != "expert":
            return Unit(stage, place.layer, place.kind)
        assert place.layer is not None
        part = self._ranges[stage, place.layer, expert if place.expert is None else place.expert]
        return Unit(stage, place.layer, part)


def holds_all_experts(place: Place) -> bool:
    """Whether dim 0 of a tensor counts experts."""
    return place.kind == "expert" and place.expert is None


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


def _expert_ranges(both: Tables, places: Sequence[Place], experts_per_unit: int) -> dict[tuple[int, int, int], str]:
    """(stage, layer, expert) -> `e32:40`."""
    side = both.source
    owners = Numbered[tuple[int, int]]()
    owner = ints(owners.numbers((stage_of(layout), layout.coords.get("ep", 0)) for layout in side.layouts))[side.rank]
    stacked = np.array([holds_all_experts(place) for place in places], dtype=bool)[side.tensor]
    boxes = both.geometry.boxes
    keys = np.unique((owner * len(places) + side.tensor) * len(boxes) + np.where(stacked, side.box, 0))
    names = owners.items
    owned: dict[tuple[int, int, int], set[int]] = {}
    for key in keys.tolist():
        rest, box = divmod(key, len(boxes))
        number, tensor = divmod(rest, len(places))
        place = places[tensor]
        if place.kind == "expert" and place.layer is not None:
            held = range(boxes[box].lo[0], boxes[box].hi[0]) if place.expert is None else (place.expert,)
            owned.setdefault((*names[number], place.layer), set()).update(held)
    ranges: dict[tuple[int, int, int], str] = {}
    for (stage, _, layer), experts in owned.items():
        for run in _runs(sorted(experts), experts_per_unit):
            ranges.update({(stage, layer, expert): f"e{run[0]}:{run[-1] + 1}" for expert in run})
    return ranges


def _runs(numbers: list[int], longest: int) -> list[list[int]]:
    """Cuts ascending numbers into runs of consecutive ones, none longer than `longest`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1 and len(runs[-1]) < longest:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
