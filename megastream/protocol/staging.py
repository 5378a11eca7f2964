"""What one engine rank's staging may take, what is complete, and what goes. Counting only: the bytes lie elsewhere.

Not thread-safe; the owner holds a lock around every call. A piece goes through `admit`, then (outside the lock) its
bytes are written into the slot, then `arrived` or `lost`. While any piece of a set is between the two, its slot is
not given away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from megastream.plan.types import Piece, Plan
from megastream.protocol.header import PieceHeader
from megastream.protocol.terms import ProtocolError, Terms


class PieceRefused(ProtocolError):
    """A piece that must not be staged. Names the piece and what is wrong with it."""


class Key(NamedTuple):
    """Order is (incarnation, version, attempt)."""

    incarnation: int
    version: int
    attempt: int


class Verdict(Enum):
    TAKE = "take"
    """Write the bytes into the slot."""
    WAIT = "wait"
    """No slot is free: do not acknowledge, ask again when one was freed."""
    DROP = "drop"
    """Withdrawn or overtaken: receive, throw away, acknowledge."""


@dataclass(frozen=True, slots=True)
class Admission:
    verdict: Verdict
    slot: int = -1


@dataclass(frozen=True, slots=True)
class Progress:
    """What an arrival completed: `unit` sealed on this rank, `rank` = every unit of the plan sealed on this rank."""

    unit: bool = False
    rank: bool = False


@dataclass(slots=True)
class _Set:
    key: Key
    slot: int
    admitted: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    elements: Counter[str] = field(default_factory=Counter)
    users: int = 0
    """Pieces being written and readers that hold the set."""
    stays: bool = False


class StagingTable:
    """Staging of one attachment on one engine rank: at most `num_sets` versions at a time, of all units that it holds
    but those that it pulls."""

    def __init__(self, terms: Terms, plan: Plan, rank: int, num_sets: int, pulled: Collection[str] = ()) -> None:
        if num_sets < 1:
            raise ValueError(f"staging sets must be at least 1, got {num_sets}")
        self.terms, self.plan, self.rank = terms, plan, rank
        self._need = {unit: n for (unit, target), n in plan.elements.items() if target == rank and unit not in pulled}
        self._free = list(range(num_sets))
        self._sets: dict[Key, _Set] = {}
        self._dying: list[_Set] = []
        self._attempts: dict[int, int] = {}
        self._accepted: dict[int, int] = {}
        self._live = terms.base_version - 1
        self._ended = False

    @property
    def staged(self) -> tuple[Key, ...]:
        """Versions in staging, oldest first."""
        return tuple(sorted(self._sets))

    @property
    def free_slots(self) -> tuple[int, ...]:
        return tuple(self._free)

    def is_sealed(self, key: Key, units: Iterable[str] | None = None) -> bool:
        """All planned elements of these units (of every unit that this rank holds) are in."""
        staged = self._sets.get(key)
        units = self._need if units is None else units
        return staged is not None and all(staged.elements[unit] == self._need[unit] for unit in units)

    def slot_of(self, key: Key) -> int:
        """Where a version lies, also one that was dropped while a piece of it is being written."""
        staged = self._sets.get(key) or next((dead for dead in self._dying if dead.key == key), None)
        if staged is None:
            raise ProtocolError(f"{key} is not in staging of engine rank {self.rank}")
        return staged.slot

    def admit(self, header: PieceHeader, source: int) -> Admission:
        """Decides about a piece whose header came over the lane from trainer rank `source`. PieceRefused by name."""
        self.check(header, source)
        if self._ended:
            raise self._refused(header, f"attachment {self.terms.attachment} has ended")
        key = Key(header.incarnation, header.version, header.attempt)
        accepted = self._accepted.get(key.version)
        if accepted is not None and accepted < key.attempt:
            raise self._refused(header, f"attempt {accepted} of version {key.version} is already accepted")
        if key.version <= self._live or key.attempt < self._attempts.get(key.version, 0):
            return Admission(Verdict.DROP)
        self._withdraw_below(key)
        staged = self._sets.get(key)
        if staged is None:
            if not self._free:
                return Admission(Verdict.WAIT)
            staged = self._sets[key] = _Set(key, self._free.pop(0))
        if header.seq in staged.admitted:
            raise self._refused(header, "duplicate: this piece was already sent in this attempt")
        staged.admitted.add(header.seq)
        staged.users += 1
        return Admission(Verdict.TAKE, staged.slot)

    def arrived(self, header: PieceHeader) -> Progress:
        """The bytes of an admitted piece are in its slot and their checksum held."""
        key = Key(header.incarnation, header.version, header.attempt)
        staged = self._sets.get(key)
        if staged is None:
            self._leave(key)
            return Progress()
        staged.users -= 1
        staged.arrived.add(header.seq)
        piece = self.plan.pieces[header.seq]
        staged.elements[piece.unit] += piece.num_elements
        unit = staged.elements[piece.unit] == self._need[piece.unit]
        return Progress(unit=unit, rank=unit and self.is_sealed(key))

    def lost(self, header: PieceHeader) -> None:
        """The bytes of an admitted piece did not arrive. Its version can only be completed by a higher attempt."""
        self._leave(Key(header.incarnation, header.version, header.attempt))

    def hold(self, key: Key) -> bool:
        """Keeps the slot of a staged version while somebody reads it. False when the version is gone."""
        staged = self._sets.get(key)
        if staged is None:
            return False
        staged.users += 1
        return True

    def release(self, key: Key) -> None:
        """Ends a `hold`, also of a version that was dropped meanwhile."""
        self._leave(key)

    def accepted(self, version: int, attempt: int) -> None:
        """The trainer decided that `attempt` is version `version`; other attempts of it are refused from now on."""
        self._accepted[version] = attempt

    def withdrawn(self, version: int, attempt: int) -> None:
        """The trainer took this attempt back for good: it leaves staging, and what still comes of it is dropped."""
        self._withdraw_below(Key(self.terms.incarnation, version, attempt + 1))

    def committed(self, version: int) -> None:
        """`version` is live: it and everything it overtook leaves staging, and no older piece is taken again."""
        self._live = max(self._live, version)
        for key in [key for key in self._sets if key.version <= self._live]:
            self._drop(key)
        self._attempts = {v: a for v, a in self._attempts.items() if v > self._live}
        self._accepted = {v: a for v, a in self._accepted.items() if v > self._live}

    def stay(self, key: Key) -> None:
        """A part of this staged version may be committed before the rest is here."""
        if key in self._sets:
            self._sets[key].stays = True

    def end(self) -> None:
        """The attachment broke. Only versions stay of which a commit may be under way."""
        self._ended = True
        for key in [key for key, staged in self._sets.items() if not staged.stays and not self.is_sealed(key)]:
            self._drop(key)

    def _withdraw_below(self, key: Key) -> None:
        self._attempts[key.version] = max(key.attempt, self._attempts.get(key.version, 0))
        for old in [k for k in self._sets if k.version == key.version and k.attempt < key.attempt]:
            self._drop(old)

    def _drop(self, key: Key) -> None:
        staged = self._sets.pop(key)
        if staged.users:
            self._dying.append(staged)
        else:
            self._free.append(staged.slot)

    def _leave(self, key: Key) -> None:
        staged = self._sets.get(key)
        if staged is not None:
            staged.users -= 1
            return
        dead = next((dead for dead in self._dying if dead.key == key), None)
        if dead is None:
            raise ProtocolError(f"{key} is released on engine rank {self.rank}, where nobody holds it")
        dead.users -= 1
        if not dead.users:
            self._dying.remove(dead)
            self._free.append(dead.slot)

    def check(self, header: PieceHeader, source: int) -> None:
        """PieceRefused when the header is not what was agreed for a piece from trainer rank `source`."""
        terms = self.terms
        expected = {
            "kind": "piece",
            "run_id": terms.run_id,
            "incarnation": terms.incarnation,
            "attachment": terms.attachment,
            "plan_digest": terms.plan_digest,
            "encoding": "dense",
            "base_version": -1,
            "namespace": "base",
            "target": self.rank,
            "source": source,
        }
        for name, value in expected.items():
            if getattr(header, name) != value:
                raise self._refused(header, f"{name} is {getattr(header, name)!r}, expected {value!r}")
        piece = self._planned(header)
        for name in ("unit", "source", "target", "num_bytes"):
            if getattr(header, name) != getattr(piece, name):
                raise self._refused(header, f"{name} is {getattr(header, name)!r}, planned {getattr(piece, name)!r}")
        if header.version < terms.base_version:
            raise self._refused(header, f"version {header.version} is below the base version {terms.base_version}")

    def _planned(self, header: PieceHeader) -> Piece:
        if not 0 <= header.seq < len(self.plan.pieces):
            raise self._refused(header, f"seq {header.seq} is outside the plan's {len(self.plan.pieces)} pieces")
        return self.plan.pieces[header.seq]

    def _refused(self, header: PieceHeader, why: str) -> PieceRefused:
        return PieceRefused(
            f"engine rank {self.rank} refused piece {header.seq} ({header.unit}, version {header.version}, "
            f"attempt {header.attempt}) from trainer rank {header.source}: {why}"
        )
