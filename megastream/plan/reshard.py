"""The heart of the plan: join shards by tensor name, intersect their boxes, choose among replicas.

Shards that are cut alike are carved once: what a target box takes from a set of source boxes depends on the boxes
alone, and the experts of 94 layers share a handful of both. All else is arithmetic over columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megastream.layout.box import Box
from megastream.layout.columns import Ints, Numbered, expand, first_use, ints, packed
from megastream.layout.pack import item_bytes
from megastream.plan.table import ShardTable, Tables, alike, runs
from megastream.plan.types import Unit
from megastream.plan.unit import Units, stage_of


@dataclass(frozen=True)
class Moves:
    """Row for row: `boxes[box]` of a tensor goes from one source shard to one target shard, as part of a unit.

    `source` and `target` are rows of the tables, `unit` counts in `units`.
    """

    source: Ints
    target: Ints
    box: Ints
    unit: Ints
    boxes: tuple[Box, ...]
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class _Sources:
    """Trainer shards by (tensor, box): replicas of each other stand together in `rows`, by rank.

    `keys` (tensor * number of boxes + box) ascend; group g is `rows[start[g] : start[g] + count[g]]`, and `ranks[g]`
    counts in `rank_sets`, the sets of ranks that hold such replicas: first each rank by itself.
    """

    keys: Ints
    rows: Ints
    start: Ints
    count: Ints
    ranks: Ints
    rank_sets: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Parts:
    """Row for row a part of a target shard, by target: `boxes[box]` of it comes from a source that holds `held`, a
    number in the geometry."""

    target: Ints
    box: Ints
    held: Ints
    boxes: tuple[Box, ...]


def reshard(both: Tables, units: Units) -> Moves:
    """One move for every element that an engine rank needs. Deterministic for equal layouts.

    ValueError names a tensor, engine rank and region that no trainer rank holds.
    """
    sources = _sources(both)
    parts = _carve_all(both, sources)
    target, tensor = parts.target, both.target.tensor[parts.target]
    first = ints(box.lo[0] if box.lo else 0 for box in parts.boxes)[parts.box]
    volume = ints(box.volume for box in parts.boxes)[parts.box]
    group = np.searchsorted(sources.keys, tensor * len(both.geometry.boxes) + parts.held)
    stages = ints(stage_of(layout) for layout in both.source.layouts)
    stage = stages[both.source.rank[sources.rows[sources.start]]][group]
    unit = units.numbers(stage, tensor, first)
    together, head = first_use(packed(unit, both.target.rank[target], sources.ranks[group]))
    item = ints(map(item_bytes, both.dtypes))[both.target.buffer_dtype[both.target.buffer[target]]]
    sizes = np.bincount(together, volume * item).astype(np.int64)
    at = _balance(sizes, sources.ranks[group[head]], sources.rank_sets, len(stages))[together]
    source = sources.rows[sources.start[group] + at]
    # Replicas on several stages (tied embeddings): the unit is that of the one that sends.
    moved = np.flatnonzero(stages[both.source.rank[source]] != stage)
    unit[moved] = units.numbers(stages[both.source.rank[source[moved]]], tensor[moved], first[moved])
    by_group = np.argsort(together, kind="stable")
    return Moves(source[by_group], target[by_group], parts.box[by_group], unit[by_group], parts.boxes, tuple(units.all))


def _sources(both: Tables) -> _Sources:
    table = both.source
    keys = table.tensor * len(both.geometry.boxes) + table.box
    rows = np.argsort(keys, kind="stable")
    start, count = runs(keys[rows])
    rank = table.rank[rows]
    sets = Numbered[tuple[int, ...]]((layout.rank,) for layout in table.layouts)
    ranks = rank[start]
    several = np.flatnonzero(count > 1)
    number, first = alike(rank, start[several], count[several])
    spans = zip(start[several[first]].tolist(), (start + count)[several[first]].tolist(), strict=True)
    ranks[several] = ints(sets.numbers(tuple(rank[begin:end].tolist()) for begin, end in spans))[number]
    return _Sources(keys[rows[start]], rows, start, count, ranks, tuple(sets.items))


def _carve_all(both: Tables, sources: _Sources) -> _Parts:
    boxes, table = both.geometry.boxes, both.target
    set_of_tensor, sets = _boxes_held(both, sources)
    kinds, first, kind = np.unique(
        set_of_tensor[table.tensor] * len(boxes) + table.box, return_index=True, return_inverse=True
    )
    found = Numbered[Box]()
    parts: list[tuple[Box, int]] = []
    count = []
    for key, row in zip(kinds.tolist(), first.tolist(), strict=True):
        carved, missing = _carve(boxes[key % len(boxes)], [(boxes[n], n) for n in sets[key // len(boxes)]])
        if missing:
            _refuse(table, row, missing)
        parts += carved
        count.append(len(carved))
    num = ints(count)
    target, part = expand((np.cumsum(num) - num)[kind], num[kind])
    box, held = ints(found.numbers(box for box, _ in parts)), ints(number for _, number in parts)
    return _Parts(target, box[part], held[part], tuple(found.items))


def _boxes_held(both: Tables, sources: _Sources) -> tuple[Ints, list[list[int]]]:
    """The distinct boxes of tensors on the trainer, in the order in which ranks hold them: the number of every
    tensor's, and boxes by that number."""
    num_boxes = len(both.geometry.boxes)
    tensors, boxes = sources.keys // num_boxes, sources.keys % num_boxes
    order = np.lexsort((sources.rows[sources.start], tensors))
    boxes, length = boxes[order], np.bincount(tensors, minlength=len(both.tensors))
    start = np.cumsum(length) - length
    number, first = alike(boxes, start, length)
    spans = zip(start[first].tolist(), (start + length)[first].tolist(), strict=True)
    return number, [boxes[begin:end].tolist() for begin, end in spans]


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
    shard = table.shard(row)
    raise ValueError(
        f"{shard.tensor}: engine rank {shard.rank} needs {shard.box.volume} elements for {shard.buffer}, "
        f"no trainer rank holds {sum(box.volume for box in missing)} of them "
        f"(from {missing[0].lo} to {missing[0].hi})"
    )


def _balance(sizes: Ints, rank_set: Ints, rank_sets: Sequence[tuple[int, ...]], num_ranks: int) -> Ints:
    """Position of every group's source in its set of ranks: groups without a choice first, then the largest to the
    least loaded rank. The first `num_ranks` sets are of one rank each.

    A group is all that one unit sends from one set of replicas to one target, so that it stays in few pieces.
    """
    chosen = np.zeros(len(sizes), dtype=np.int64)
    alone = rank_set < num_ranks
    loads = np.bincount(rank_set[alone], sizes[alone], num_ranks).astype(np.int64).tolist()
    free = np.flatnonzero(~alone)
    free = free[np.argsort(-sizes[free], kind="stable")]
    for group, number, size in zip(free.tolist(), rank_set[free].tolist(), sizes[free].tolist(), strict=True):
        ranks = rank_sets[number]
        rank = min(ranks, key=loads.__getitem__)
        chosen[group] = ranks.index(rank)
        loads[rank] += size
    return chosen
