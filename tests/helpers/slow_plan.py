"""The slow planner: shard by shard and copy by copy, in plain Python, every layer for itself.

It knows no columns and takes nothing for alike, and shares with the planner only boxes, units' order and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megastream.families.types import Place
from megastream.layout.box import Box
from megastream.layout.pack import item_bytes
from megastream.layout.shard import RankLayout, Shard
from megastream.plan.check import transform_between
from megastream.plan.types import Copy, Piece, Unit
from megastream.plan.unit import stage_of, unit_order

_Key = tuple[int, int, tuple[int, float, int, int, str], int, str]
_Group = tuple[Unit, int, tuple[int, ...]]


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


def slow_pieces(
    trainer: Sequence[RankLayout],
    engine: Sequence[RankLayout],
    place_of: Callable[[str], Place],
    piece_bytes: int,
    experts_per_unit: int,
) -> tuple[Piece, ...]:
    """The pieces of a plan between layouts that are known to fit."""
    moves = reshard(trainer, engine, Units(trainer, place_of, experts_per_unit), place_of)
    return schedule(moves, trainer, engine, piece_bytes)


class Units:
    """Maps (trainer stage, place) to units.

    Expert units are ranges of at most `experts_per_unit` consecutive global experts, and never reach across what one
    trainer expert-parallel rank owns: otherwise a unit would wait for two ranks.
    """

    def __init__(self, trainer: Sequence[RankLayout], place_of: Callable[[str], Place], experts_per_unit: int) -> None:
        self._ranges = _expert_ranges(trainer, place_of, experts_per_unit)

    def unit(self, stage: int, place: Place, box: Box) -> Unit:
        """The unit of a tensor whose bytes come from trainer stage `stage`."""
        if place.kind != "expert":
            return Unit(stage, place.layer, place.kind)
        assert place.layer is not None
        start, stop = self._ranges[stage, place.layer, box.lo[0] if place.expert is None else place.expert]
        return Unit(stage, place.layer, f"e{start}:{stop}")


def reshard(
    trainer: Sequence[RankLayout], engine: Sequence[RankLayout], units: Units, place_of: Callable[[str], Place]
) -> list[Move]:
    """One move for every element that an engine rank needs. Deterministic for equal layouts.

    ValueError names a tensor, engine rank and region that no trainer rank holds.
    """
    sources = _index(trainer)
    stages = {layout.rank: stage_of(layout) for layout in trainer}
    groups: dict[_Group, list[_Option]] = {}
    loads = {layout.rank: 0 for layout in trainer}
    sizes: dict[_Group, int] = {}
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


def _balance(sizes: dict[_Group, int], loads: dict[int, int]) -> dict[_Group, int]:
    """Source rank of every group: those without a choice first, then the largest to the least loaded rank.

    A group is all that one unit sends from one set of replicas to one target, so that it stays in few pieces.
    """
    chosen: dict[_Group, int] = {}
    order = sorted(enumerate(sizes), key=lambda item: (len(item[1][2]) > 1, -sizes[item[1]], item[0]))
    for _, key in order:
        rank = min(key[2], key=lambda rank: (loads[rank], rank))
        chosen[key] = rank
        loads[rank] += sizes[key]
    return chosen


def schedule(
    moves: Sequence[Move], trainer: Sequence[RankLayout], engine: Sequence[RankLayout], piece_bytes: int
) -> tuple[Piece, ...]:
    """Pieces of at most `piece_bytes`, one per source buffer, unit and target at least.

    Order: by source rank, then as its buffers become final, then by unit and target. ValueError names a dtype pair
    that is refused, or a `piece_bytes` that holds no element.
    """
    orders = {layout.rank: {spec.name: i for i, spec in enumerate(layout.buffers)} for layout in trainer}
    source_dtypes = {layout.rank: {spec.name: spec.dtype for spec in layout.buffers} for layout in trainer}
    target_dtypes = {layout.rank: {spec.name: spec.dtype for spec in layout.buffers} for layout in engine}
    groups: dict[_Key, list[Move]] = {}
    for move in moves:
        source, target = move.source, move.target
        dtype = target_dtypes[target.rank][target.buffer]
        if item_bytes(dtype) > piece_bytes:
            raise ValueError(f"piece_bytes is {piece_bytes}; one {dtype} element takes {item_bytes(dtype)}")
        transform_between(target.tensor, source_dtypes[source.rank][source.buffer], dtype)
        order = orders[source.rank][source.buffer]
        groups.setdefault((source.rank, order, unit_order(move.unit), target.rank, dtype), []).append(move)
    pieces: list[Piece] = []
    for key in sorted(groups):
        dtype = key[-1]
        first = groups[key][0]
        source_dtype = source_dtypes[first.source.rank][first.source.buffer]
        for copies in _cut(groups[key], piece_bytes // item_bytes(dtype)):
            num_elements = sum(prod(copy.shape) for copy in copies)
            pieces.append(
                Piece(
                    seq=len(pieces),
                    source=first.source.rank,
                    target=first.target.rank,
                    source_buffer=first.source.buffer,
                    unit=str(first.unit),
                    dtype=dtype,
                    transform=transform_between(first.target.tensor, source_dtype, dtype),
                    num_elements=num_elements,
                    num_bytes=num_elements * item_bytes(dtype),
                    copies=tuple(copies),
                )
            )
    return tuple(pieces)


def _cut(moves: Sequence[Move], most: int) -> Iterator[list[Copy]]:
    """Fills pieces of at most `most` elements in order; only a copy that is larger by itself is split."""
    copies: list[Copy] = []
    room = most
    for move in moves:
        for box in _split(move.box, most):
            if box.volume > room:
                yield copies
                copies, room = [], most
            copies.append(_copy(move, box))
            room -= box.volume
    if copies:
        yield copies


def _split(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements, each as many whole rows as fit, or parts of one row."""
    if box.volume <= most:
        yield box
        return
    row = box.volume // box.shape[0]
    step = max(most // row, 1)
    for lo in range(box.lo[0], box.hi[0], step):
        hi = min(lo + step, box.hi[0])
        if row <= most:
            yield Box((lo, *box.lo[1:]), (hi, *box.hi[1:]))
            continue
        for inner in _split(Box(box.lo[1:], box.hi[1:]), most):
            yield Box((lo, *inner.lo), (hi, *inner.hi))


def _copy(move: Move, box: Box) -> Copy:
    return Copy(
        tensor=move.target.tensor,
        shape=box.shape,
        source_offset=_offset(move.source, box),
        source_strides=move.source.strides,
        target_buffer=move.target.buffer,
        target_offset=_offset(move.target, box),
        target_strides=move.target.strides,
    )


def _offset(shard: Shard, box: Box) -> int:
    steps = zip(box.lo, shard.box.lo, shard.strides, strict=True)
    return shard.offset + sum((a - b) * stride for a, b, stride in steps)


def _expert_ranges(
    trainer: Sequence[RankLayout], place_of: Callable[[str], Place], experts_per_unit: int
) -> dict[tuple[int, int, int], tuple[int, int]]:
    owned: dict[tuple[int, int, int], set[int]] = {}
    for layout in trainer:
        owner = stage_of(layout), layout.coords.get("ep", 0)
        for shard in layout.shards:
            place = place_of(shard.tensor)
            if place.kind == "expert" and place.layer is not None:
                stacked = range(shard.box.lo[0], shard.box.hi[0]) if place.expert is None else (place.expert,)
                owned.setdefault((*owner, place.layer), set()).update(stacked)
    ranges: dict[tuple[int, int, int], tuple[int, int]] = {}
    for (stage, _, layer), experts in owned.items():
        for run in _runs(sorted(experts), experts_per_unit):
            ranges.update({(stage, layer, expert): (run[0], run[-1] + 1) for expert in run})
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
