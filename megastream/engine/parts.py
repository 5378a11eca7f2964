"""How a version is cut into parts that are prepared and become live one by one. Geometry of one engine rank only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megastream.plan.types import Copy, Piece
from megastream.plan.unit import experts_of
from megastream.protocol.mix import Gate
from megastream.protocol.terms import ProtocolError

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of elements of a flat buffer."""


@dataclass(frozen=True, slots=True)
class Part:
    """Units that become live together on this rank, and what of its buffers they are."""

    units: frozenset[str]
    buffers: tuple[str, ...]
    ranges: Mapping[str, Ranges]
    """For buffers that hold other units too: the elements of this part."""


@dataclass(slots=True)
class Staged:
    """What is known about one version in staging."""

    parts: tuple[Part, ...]
    becomes_live_in_parts: bool
    prepared: dict[int, Any] = field(default_factory=dict)
    prepare_s: float = 0.0
    written: int = 0
    """Elements that lie in staging, counted as they were written."""

    def chosen(self, units: tuple[str, ...] | None, what: str) -> tuple[list[tuple[Part, Any]], str]:
        """The parts of these units (of all) with what was prepared of them, or why they cannot be committed."""
        chosen = [i for i, part in enumerate(self.parts) if units is None or part.units.intersection(units)]
        for index in chosen:
            part = self.parts[index]
            if index not in self.prepared:
                return [], f"{what} is not prepared here: units {', '.join(sorted(part.units)[:5])} are missing"
            if units is not None and not part.units.issubset(units):
                return [], f"{what} has units {', '.join(sorted(part.units)[:5])} prepared together, not one by one"
        return [(self.parts[index], self.prepared[index]) for index in chosen], ""


def cut(pieces: Sequence[Piece], gate: Gate, *, shared: bool = False) -> tuple[Part, ...]:
    """The parts of a version on the engine rank that receives `pieces`: all units in one of them for gate `version`,
    one per trainer stage for `stage`, one per expert unit and one for the rest for `idle_experts`.

    `shared`: buffers also hold what no piece writes. ProtocolError names a buffer that cannot be written in such parts.
    """
    extents: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for piece in pieces:
        for copy in piece.copies:
            extents.setdefault(copy.target_buffer, {}).setdefault(piece.unit, []).append(_extent(copy))
    groups: dict[str, set[str]] = {}
    for piece in pieces:
        groups.setdefault(_group(piece.unit, gate), set()).add(piece.unit)
    return tuple(_part(units, extents, gate, shared) for _, units in sorted(groups.items()))


def _group(unit: str, gate: Gate) -> str:
    if gate == "stage":
        return unit.partition(".")[0]
    return unit if gate == "idle_experts" and experts_of(unit) is not None else ""


def _part(
    units: set[str], extents: Mapping[str, Mapping[str, list[tuple[int, int]]]], gate: Gate, shared: bool
) -> Part:
    buffers: list[str] = []
    ranges: dict[str, Ranges] = {}
    for buffer, by_unit in extents.items():
        if units.isdisjoint(by_unit):
            continue
        buffers.append(buffer)
        if shared or not units.issuperset(by_unit):
            mine = [extent for unit in by_unit if unit in units for extent in by_unit[unit]]
            others = [extent for unit in by_unit if unit not in units for extent in by_unit[unit]]
            ranges[buffer] = _joined(mine)
            _check_apart(buffer, ranges[buffer], _joined(others), gate)
    return Part(frozenset(units), tuple(buffers), ranges)


def _check_apart(buffer: str, mine: Ranges, others: Ranges, gate: Gate) -> None:
    if others and (gate == "stage" or any(a < d and c < b for a, b in mine for c, d in others)):
        raise ProtocolError(
            f"gate {gate} cannot be had with this plan: {buffer} holds units of several parts, which are written "
            "together; use gate version"
        )


def _extent(copy: Copy) -> tuple[int, int]:
    """From the first to behind the last element that a copy writes."""
    last = sum((n - 1) * stride for n, stride in zip(copy.shape, copy.target_strides, strict=True))
    return copy.target_offset, copy.target_offset + last + 1


def _joined(extents: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges that touch or overlap are one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(extents):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)
