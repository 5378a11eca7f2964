"""The heart of the plan: join shards by tensor name, intersect their boxes, choose among replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megastream.layout.box import Box
from megastream.layout.pack import item_bytes
from megastream.layout.shard import RankLayout, Shard
from megastream.plan.types import Unit
from megastream.plan.unit import PlaceOf, Units, stage_of


@dataclass(frozen=True, slots=True)
class Move:
    """`box` of a tensor goes from one source shard to one target shard, as part of `unit`."""

    unit: Unit
    source: Shard
    target: Shard
    box: Box


@dataclass(frozen=True, slots=True)
class _Option:
    """A region that one target shard needs, and all source shards that hold it whole, by rank."""

    target: Shard
    box: Box
    sources: tuple[Shard, ...]


def reshard(trainer: Sequence[RankLayout], engine: Sequence[RankLayout], units: Units, place_of: PlaceOf) -> list[Move]:
    """One move for every element that an engine rank needs. Deterministic for equal layouts.

    ValueError names a tensor, engine rank and region that no trainer rank holds.
    """
    sources = _index(trainer)
    stages = {layout.rank: stage_of(layout) for layout in trainer}
    groups: dict[tuple[Unit, int, tuple[int, ...]], list[_Option]] = {}
    loads = {layout.rank: 0 for layout in trainer}
    sizes: dict[tuple[Unit, int, tuple[int, ...]], int] = {}
    for layout in engine:
        item = {buffer.name: item_bytes(buffer.dtype) for buffer in layout.buffers}
        for target in layout.shards:
            place = place_of(target.tensor)
            for option in _carve(target, sources.get(target.tensor, {})):
                ranks = tuple(shard.rank for shard in option.sources)
                key = units.unit(stages[ranks[0]], place, option.box), target.rank, ranks
                groups.setdefault(key, []).append(option)
                sizes[key] = sizes.get(key, 0) + option.box.volume * item[target.buffer]
    chosen = _balance({key: sizes[key] for key in groups}, loads)
    moves: list[Move] = []
    for key, options in groups.items():
        index = key[2].index(chosen[key])
        for option in options:
            unit = units.unit(stages[chosen[key]], place_of(option.target.tensor), option.box)
            moves.append(Move(unit, option.sources[index], option.target, option.box))
    return moves


def _index(trainer: Sequence[RankLayout]) -> dict[str, dict[Box, list[Shard]]]:
    """Source shards by tensor and box; those with equal boxes are replicas of each other."""
    index: dict[str, dict[Box, list[Shard]]] = {}
    for layout in sorted(trainer, key=lambda layout: layout.rank):
        for shard in layout.shards:
            index.setdefault(shard.tensor, {}).setdefault(shard.box, []).append(shard)
    return index


def _carve(target: Shard, sources: dict[Box, list[Shard]]) -> list[_Option]:
    """Cuts what the target needs along the borders of the sources, each element once."""
    options: list[_Option] = []
    uncovered = [target.box]
    for box, replicas in sources.items():
        if not uncovered:
            break
        rest: list[Box] = []
        for part in uncovered:
            common = part.intersect(box)
            if common is None:
                rest.append(part)
                continue
            options.append(_Option(target, common, tuple(replicas)))
            rest.extend(part.subtract(box))
        uncovered = rest
    if uncovered:
        missing = sum(box.volume for box in uncovered)
        raise ValueError(
            f"{target.tensor}: engine rank {target.rank} needs {target.box.volume} elements for {target.buffer}, "
            f"no trainer rank holds {missing} of them (from {uncovered[0].lo} to {uncovered[0].hi})"
        )
    return options


def _balance(
    sizes: dict[tuple[Unit, int, tuple[int, ...]], int], loads: dict[int, int]
) -> dict[tuple[Unit, int, tuple[int, ...]], int]:
    """Source rank of every group: those without a choice first, then the largest to the least loaded rank.

    A group is all that one unit sends from one set of replicas to one target, so that it stays in few pieces.
    """
    chosen: dict[tuple[Unit, int, tuple[int, ...]], int] = {}
    order = sorted(enumerate(sizes), key=lambda item: (len(item[1][2]) > 1, -sizes[item[1]], item[0]))
    for _, key in order:
        rank = min(key[2], key=lambda rank: (loads[rank], rank))
        chosen[key] = rank
        loads[rank] += sizes[key]
    return chosen
