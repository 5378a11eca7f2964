"""The heart of the plan: join shards by tensor name, intersect their boxes, choose among replicas.

Shards that are cut alike are carved once: what a target box takes from a set of source boxes depends on the boxes
alone, and the experts of 94 layers share a handful of both. All else is arithmetic over columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megastream.families.types import Place
from megastream.layout.box import Box
from megastream.layout.pack import item_bytes
from megastream.plan.table import Ints, Numbered, ShardTable, Tables, expand, ints, padded, runs
from megastream.plan.types import Unit
from megastream.plan.unit import Units, holds_all_experts, stage_of


@dataclass(frozen=True)
class Moves:
    """Row for row: box [lo, hi) of a tensor goes from one source shard to one target shard, as part of a unit.

    `source` and `target` are rows of the tables, `unit` counts in `units`.
    """

    source: Ints
    target: Ints
    lo: Ints
    hi: Ints
    unit: Ints
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class _Sources:
    """Trainer shards by (tensor, box): replicas of each other stand together in `rows`, by rank.

    `keys` (tensor * number of boxes + box) ascend; group g is `rows[start[g] : start[g] + count[g]]`, and `ranks[g]`
    counts in `rank_sets`, the sets of ranks that hold such replicas.
    """

    keys: Ints
    rows: Ints
    start: Ints
    count: Ints
    ranks: Ints
    rank_sets: tuple[tuple[int, ...], ...]


def reshard(both: Tables, units: Units, places: Sequence[Place]) -> Moves:
    """One move for every element that an engine rank needs. Deterministic for equal layouts.

    ValueError names a tensor, engine rank and region that no trainer rank holds.
    """
    sources = _sources(both)
    target, lo, hi, box = _carve_all(both, sources)
    tensor = both.target.tensor[target]
    group = np.searchsorted(sources.keys, tensor * len(both.geometry.boxes) + box)
    stages = ints(stage_of(layout) for layout in both.source.layouts)
    names = Numbered[Unit]()
    stacked = np.array([holds_all_experts(place) for place in places], dtype=bool)[tensor]
    expert = np.where(stacked, lo[:, 0], 0)
    most = int(expert.max(initial=0)) + 1

    def unit_of(stage: Ints) -> Ints:
        """Numbers of the units of all moves, when they come from these stages."""
        keys, inverse = np.unique((stage * len(places) + tensor) * most + expert, return_inverse=True)
        found = ((*divmod(key // most, len(places)), key % most) for key in keys.tolist())
        return ints(names.numbers(units.unit(s, places[t], e) for s, t, e in found))[inverse]

    first = both.source.rank[sources.rows[sources.start]]
    together = _together(unit_of(stages[first[group]]), both.target.rank[target], sources.ranks[group])
    item = ints(item_bytes(spec.dtype) for spec in both.target.buffers)[both.target.buffer[target]]
    sizes = np.bincount(together, (hi - lo).prod(axis=1) * item).astype(np.int64)
    rank_set = np.zeros(len(sizes), dtype=np.int64)
    rank_set[together] = sources.ranks[group]
    at = _balance(sizes, [sources.rank_sets[number] for number in rank_set], len(stages))[together]
    source = sources.rows[sources.start[group] + at]
    unit = unit_of(stages[both.source.rank[source]])
    by_group = np.argsort(together, kind="stable")
    return Moves(
        source[by_group],
        target[by_group],
        lo[by_group],
        hi[by_group],
        unit[by_group],
        tuple(names.items),
    )


def _sources(both: Tables) -> _Sources:
    table = both.source
    keys = table.tensor * len(both.geometry.boxes) + table.box
    rows = np.argsort(keys, kind="stable")
    start, count = runs(keys[rows])
    sets = Numbered[tuple[int, ...]]()
    rank = table.rank[rows]
    single = table.rank[rows[start]].tolist()
    ranks = sets.numbers(
        (first,) if n == 1 else tuple(rank[at : at + n].tolist())
        for first, at, n in zip(single, start.tolist(), count.tolist(), strict=True)
    )
    return _Sources(keys[rows[start]], rows, start, count, ints(ranks), tuple(sets.items))


def _carve_all(both: Tables, sources: _Sources) -> tuple[Ints, Ints, Ints, Ints]:
    """(target row, lo, hi, source box) of every part, by target row."""
    boxes, table = both.geometry.boxes, both.target
    held = _boxes_held(both, sources)
    sets = Numbered[tuple[int, ...]]()
    set_of_tensor = ints(sets.numbers(held))
    kinds, first, kind = np.unique(
        set_of_tensor[table.tensor] * len(boxes) + table.box, return_index=True, return_inverse=True
    )
    parts: list[tuple[Box, int]] = []
    count = []
    for key, row in zip(kinds.tolist(), first.tolist(), strict=True):
        carved, missing = _carve(boxes[key % len(boxes)], [(boxes[n], n) for n in sets.items[key // len(boxes)]])
        if missing:
            _refuse(table, row, missing)
        parts += carved
        count.append(len(carved))
    num = ints(count)
    target, part = expand((np.cumsum(num) - num)[kind], num[kind])
    width = both.geometry.width
    lo, hi = padded([box.lo for box, _ in parts], width, 0), padded([box.hi for box, _ in parts], width, 1)
    return target, lo[part], hi[part], ints(number for _, number in parts)[part]


def _boxes_held(both: Tables, sources: _Sources) -> list[tuple[int, ...]]:
    """The distinct boxes of every tensor on the trainer, in the order in which ranks hold them."""
    num_boxes = len(both.geometry.boxes)
    tensors = sources.keys // num_boxes
    order = np.lexsort((sources.rows[sources.start], tensors))
    boxes = (sources.keys % num_boxes)[order]
    held: list[tuple[int, ...]] = [()] * len(both.tensors)
    for start, length in zip(*map(Ints.tolist, runs(tensors[order])), strict=True):
        held[tensors[order[start]]] = tuple(boxes[start : start + length].tolist())
    return held


def _carve(target: Box, sources: Sequence[tuple[Box, int]]) -> tuple[list[tuple[Box, int]], list[Box]]:
    """Cuts what a target needs along the borders of the sources, each element once; and what no source holds."""
    parts: list[tuple[Box, int]] = []
    uncovered = [target]
    for box, number in sources:
        if not uncovered:
            break
        rest: list[Box] = []
        for part in uncovered:
            common = part.intersect(box)
            if common is None:
                rest.append(part)
                continue
            parts.append((common, number))
            rest.extend(part.subtract(box))
        uncovered = rest
    return parts, uncovered


def _refuse(table: ShardTable, row: int, missing: Sequence[Box]) -> None:
    shard = table.shards[row]
    raise ValueError(
        f"{shard.tensor}: engine rank {shard.rank} needs {shard.box.volume} elements for {shard.buffer}, "
        f"no trainer rank holds {sum(box.volume for box in missing)} of them "
        f"(from {missing[0].lo} to {missing[0].hi})"
    )


def _together(unit: Ints, target: Ints, ranks: Ints) -> Ints:
    """Numbers the groups of moves that share unit, engine rank and set of replicas, in the order of their first one."""
    keys = (unit * (target.max() + 1) + target) * (ranks.max() + 1) + ranks
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[group]


def _balance(sizes: Ints, rank_sets: Sequence[tuple[int, ...]], num_ranks: int) -> Ints:
    """Position of every group's source in its set of ranks: groups without a choice first, then the largest to the
    least loaded rank.

    A group is all that one unit sends from one set of replicas to one target, so that it stays in few pieces.
    """
    loads = [0] * num_ranks
    chosen = np.zeros(len(sizes), dtype=np.int64)
    bytes_of = sizes.tolist()
    free: list[int] = []
    for group, ranks in enumerate(rank_sets):
        if len(ranks) == 1:
            loads[ranks[0]] += bytes_of[group]
        else:
            free.append(group)
    for group in sorted(free, key=lambda group: -bytes_of[group]):
        ranks = rank_sets[group]
        _, rank, at = min((loads[rank], rank, at) for at, rank in enumerate(ranks))
        chosen[group] = at
        loads[rank] += bytes_of[group]
    return chosen
