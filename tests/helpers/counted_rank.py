"""An engine rank that only counts: its staging table, the piece in each place of a slot, the version of live units."""

from __future__ import annotations

from typing import Any

from megastream.protocol.header import PieceHeader
from megastream.protocol.part_records import UnitsSealed
from megastream.protocol.records import Sealed, WeightsReady
from megastream.protocol.staging import Key, StagingTable
from tests.helpers.plans import PARTS, plan_of_parts

PLAN = plan_of_parts()
RANKS, SETS = 2, 2
LANES = sorted({(piece.source, piece.target) for piece in PLAN.pieces})
CUTS = {"version": lambda unit: "", "stage": lambda unit: unit[:2], "units": lambda unit: unit}
"""Gate -> the part that a unit belongs to; `units` is the finest cut that there can be."""


def key_of(named: Any) -> Key:
    """Of a piece's header, or of a record."""
    return Key(named.incarnation, named.version, named.attempt)


def manifest_of(key: Key) -> WeightsReady:
    elements = sum(PLAN.elements.values())
    return WeightsReady(
        attachment="i1", train_step=0, plan_digest="digest", units=(), elements=elements, **key._asdict()
    )


class CountedRank:
    """`staging` is set by whoever makes an attachment."""

    staging: StagingTable

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.held = [unit for unit, ranks in PARTS.items() if rank in ranks]
        self.live: dict[str, int | None] = dict.fromkeys(self.held, 0)
        """None: a commit broke off, nobody knows."""
        self.highest: dict[str, int] = {}
        self.slots: list[dict[int, Key]] = [{} for _ in range(SETS)]
        self.writing: list[tuple[PieceHeader, int]] = []
        self.gate = "units"
        self.cuts: dict[Key, str] = {}
        """The gate for which each version was cut when its first piece came."""

    def check_never_backwards(self) -> None:
        known = {unit: version for unit, version in self.live.items() if version is not None}
        assert all(version >= self.highest.get(unit, 0) for unit, version in known.items())
        self.highest |= known

    def take(self, header: PieceHeader, slot: int) -> None:
        """The piece was admitted; its bytes are on their way into the slot."""
        self.cuts.setdefault(key_of(header), self.gate)
        self.writing.append((header, slot))

    def put(self, header: PieceHeader, slot: int) -> list[Any]:
        """The bytes are there: what this rank says now."""
        key = key_of(header)
        assert self.staging.slot_of(key) == slot, "a slot was given away while it was being written"
        self.slots[slot][header.seq] = key
        progress, part, said = self.staging.arrived(header), self.part_of(key, header.unit), []
        name = {"attachment": "i1", "rank": self.rank, "plan_digest": "digest", **key._asdict()}
        if progress.unit and self.cuts[key] != "version" and self.staging.is_sealed(key, part):
            self.staging.stay(key)
            said.append(UnitsSealed(**name, units=tuple(part)))
        if progress.rank:
            elements = sum(n for (_, target), n in PLAN.elements.items() if target == self.rank)
            said.append(Sealed(**name, elements=elements, prepare_s=0.0))
        return said

    def part_of(self, key: Key, unit: str) -> list[str]:
        """Units that this rank prepares together with `unit`."""
        cut = CUTS[self.cuts[key]]
        return [other for other in self.held if cut(other) == cut(unit)]

    def write(self, key: Key, units: tuple[str, ...] | None) -> None:
        """A commit: all pieces of these units must lie in the version's slot, prepared with none that stays behind."""
        for unit in self.held if units is None else units:
            if unit not in self.live:
                continue
            slot = self.slots[self.staging.slot_of(key)]
            pieces = [p.seq for p in PLAN.by_target[self.rank] if p.unit == unit]
            assert [slot.get(seq) for seq in pieces] == [key] * len(pieces), "staging holds something else"
            if units is not None:
                assert {*units}.issuperset(self.part_of(key, unit)), "units are written that were prepared with others"
            self.live[unit] = key.version
