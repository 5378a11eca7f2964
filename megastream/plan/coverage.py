"""The proof that a plan writes every target element exactly once, from the right place.

It reads finished pieces and the two layouts only: offsets are turned back into tensor coordinates on both sides, so
that a fault in joining, choosing, cutting or ordering shows here, by name, before a byte moves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from megastream.layout.box import Box
from megastream.layout.shard import RankLayout, Shard
from megastream.plan.types import Copy, Piece

_Shards = dict[tuple[int, str, str], list[Shard]]


class CoverageError(ValueError):
    """A plan that would leave an element out, write one twice, or take one from the wrong place."""


def prove_coverage(pieces: Iterable[Piece], trainer: Sequence[RankLayout], engine: Sequence[RankLayout]) -> None:
    """CoverageError names the tensor, the rank and both numbers of the first fault."""
    sources, targets = _by_place(trainer), _by_place(engine)
    written: dict[int, list[Box]] = {id(shard): [] for layout in engine for shard in layout.shards}
    for piece in pieces:
        for copy in piece.copies:
            here = piece.source, piece.source_buffer, copy.tensor
            there = piece.target, copy.target_buffer, copy.tensor
            _, source = _locate(copy, copy.source_offset, copy.source_strides, sources.get(here, []), "trainer", piece)
            shard, box = _locate(copy, copy.target_offset, copy.target_strides, targets.get(there, []), "engine", piece)
            if source != box:
                raise CoverageError(
                    f"{copy.tensor}: piece {piece.seq} takes {source.lo} to {source.hi} from trainer rank "
                    f"{piece.source} and writes it as {box.lo} to {box.hi} on engine rank {piece.target}"
                )
            written[id(shard)].append(box)
    for layout in engine:
        for shard in layout.shards:
            _check_exactly_once(shard, written[id(shard)])


def _by_place(layouts: Sequence[RankLayout]) -> _Shards:
    shards: _Shards = {}
    for layout in layouts:
        for shard in layout.shards:
            shards.setdefault((layout.rank, shard.buffer, shard.tensor), []).append(shard)
    for group in shards.values():
        group.sort(key=lambda shard: shard.offset)
    return shards


def _locate(
    copy: Copy, offset: int, strides: tuple[int, ...], shards: list[Shard], side: str, piece: Piece
) -> tuple[Shard, Box]:
    """The shard that holds a copy on one side, and the copy's box in tensor coordinates."""
    index = bisect_right(shards, offset, key=lambda shard: shard.offset)
    for shard in reversed(shards[:index]):
        lo = _coordinates(shard, offset)
        if lo is None or strides != shard.strides:
            continue
        hi = tuple(a + n for a, n in zip(lo, copy.shape, strict=True))
        if all(a <= b for a, b in zip(hi, shard.box.hi, strict=True)):
            return shard, Box(lo, hi)
    rank = piece.source if side == "trainer" else piece.target
    raise CoverageError(
        f"{copy.tensor}: piece {piece.seq} touches {copy.shape} elements at {offset}, "
        f"where {side} rank {rank} has none of that tensor"
    )


def _coordinates(shard: Shard, offset: int) -> tuple[int, ...] | None:
    """Tensor coordinates of a buffer element, or None when it is not the shard's."""
    rest = offset - shard.offset
    place = list(shard.box.lo)
    for dim in sorted(range(len(place)), key=lambda dim: -shard.strides[dim]):
        step, rest = divmod(rest, shard.strides[dim])
        if step >= shard.box.shape[dim]:
            return None
        place[dim] += step
    return tuple(place) if rest == 0 else None


def _check_exactly_once(shard: Shard, boxes: list[Box]) -> None:
    """Disjoint boxes inside the shard whose volumes add up to it cover it exactly once."""
    where = f"{shard.tensor}: {shard.buffer} on engine rank {shard.rank}"
    boxes.sort()
    open_boxes: list[Box] = []
    for box in boxes:
        open_boxes = [other for other in open_boxes if other.hi[:1] > box.lo[:1]]
        for other in open_boxes:
            common = box.intersect(other)
            if common is not None:
                raise CoverageError(f"{where} gets {common.volume} elements twice, from {common.lo} to {common.hi}")
        open_boxes.append(box)
    total = sum(box.volume for box in boxes)
    if total != shard.box.volume:
        raise CoverageError(f"{where} gets {total} of {shard.box.volume} elements")
