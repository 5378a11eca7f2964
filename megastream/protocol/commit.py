"""When a version may become live, decided for one engine over all its ranks. No threads, no clocks, no bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from megastream.protocol.mix import Mix
from megastream.protocol.part_records import UnitsSealed
from megastream.protocol.records import Accepted, Sealed, WeightsReady
from megastream.protocol.staging import Key
from megastream.protocol.terms import ProtocolError, Terms


@dataclass(slots=True)
class _Version:
    sealed: dict[tuple[int, int], Sealed] = field(default_factory=dict)
    units: defaultdict[tuple[int, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    """(attempt, unit) -> ranks that have sealed it before the rest."""
    everywhere: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Attempt -> units that every rank which holds them has sealed before the rest."""
    groups: set[tuple[int, frozenset[str]]] = field(default_factory=set)
    """(attempt, units) that some rank has prepared together."""
    accepted: int | None = None
    manifest: WeightsReady | None = None


class CommitTable:
    """The versions of one attachment as the engine's coordinator sees them.

    A version is ready when it is accepted, its manifest is there, and every rank that holds any of it sealed the
    accepted attempt under the same plan. The newest ready version goes first and older ones are dropped as a whole; at
    most one commit is under way; nothing goes backwards. Records may arrive in any order. ProtocolError names a
    contradiction.

    Units of one version at a time, the open one, can be committed before it is ready, each once and never all of them:
    the last ones come with the version. An open version is closed by its own commit, or overtaken by that of a newer
    one, which writes every unit. So live weights are of two versions at most.
    """

    def __init__(self, terms: Terms, world_size: int, holders: Mapping[str, Collection[int]] | None = None) -> None:
        """`holders`: engine ranks that hold a part of each unit; the others have nothing to seal. Without them no unit
        is committed early."""
        self.terms, self.world_size = terms, world_size
        self.holders = dict(holders or {})
        self._sealing = len({rank for ranks in self.holders.values() for rank in ranks}) or world_size
        """As many ranks seal a version."""
        self.live = terms.base_version - 1
        """The newest version of which every unit is live."""
        self.in_flight: Key | None = None
        self.poisoned = False
        self.whole_next = False
        """Nothing is committed early before a version was committed whole: the open one is late, or was withdrawn."""
        self._open: int | None = None
        self._ahead: dict[str, None] = {}
        """Units that are live at the open version, in the order of their commits."""
        self._part: tuple[str, ...] = ()
        """Units of the commit under way, when it is not one of a whole version."""
        self._closed = False
        self._versions: dict[int, _Version] = {}
        """Only what is newer than `live`."""
        self._withdrawn: set[Key] = set()
        """Attempts newer than `live` that never become whole, whatever is said of them later."""

    @property
    def is_drained(self) -> bool:
        """No commit is under way, and none will start."""
        return self._closed and self.in_flight is None

    @property
    def mix(self) -> Mix | None:
        """What live weights hold once the commit under way, if any, has succeeded; None while it is one version."""
        if self._open is None:
            return None
        ahead = {**self._ahead, **dict.fromkeys(self._part)}
        behind = tuple(unit for unit in self.holders if unit not in ahead)
        return Mix(self.live, self._open, tuple(ahead), behind)

    def sealed(self, record: Sealed) -> None:
        version = self._version(record)
        if version is None:
            return
        self._check_seal(record)
        version.sealed[record.attempt, record.rank] = record
        self._check_elements(record.version, version)

    def units_sealed(self, record: UnitsSealed) -> None:
        version = self._version(record)
        if version is None:
            return
        self._check_seal(record)
        version.groups.add((record.attempt, frozenset(record.units)))
        for unit in record.units:
            holders = self.holders.get(unit, ())
            if record.rank not in holders:
                raise ProtocolError(f"engine rank {record.rank} sealed unit {unit}, of which it holds nothing")
            version.units[record.attempt, unit].add(record.rank)
            if version.units[record.attempt, unit].issuperset(holders):
                version.everywhere[record.attempt].add(unit)

    def accepted(self, record: Accepted) -> None:
        version = self._version(record)
        if version is None:
            return
        if version.accepted not in (None, record.attempt):
            raise ProtocolError(
                f"version {record.version} was accepted as attempt {version.accepted} and as attempt {record.attempt}"
            )
        version.accepted = record.attempt

    def manifest(self, record: WeightsReady) -> None:
        version = self._version(record)
        if version is None:
            return
        self._same_plan(record.plan_digest, f"the manifest of version {record.version}")
        version.manifest = record
        self._check_elements(record.version, version)

    def withdrawn(self, key: Key) -> None:
        """The trainer took this attempt back, perhaps after it was accepted. Whoever prepared it may forget it, behind
        a commit that is under way. When units of it are live, nothing but a whole version follows."""
        if key.version <= self.live:
            return
        self.whole_next = self.whole_next or self.is_open(key)
        self._withdrawn.add(key)
        version = self._versions.get(key.version)
        if version is not None and version.accepted in (None, key.attempt):
            del self._versions[key.version]

    def is_open(self, key: Key) -> bool:
        """Units of this attempt are live, or will be with the commit under way, and others are not."""
        version = self._versions.get(key.version)
        return self._open == key.version and version is not None and version.accepted == key.attempt

    def is_ready(self, number: int) -> bool:
        """All that a commit of this version needs is there."""
        version = self._versions.get(number)
        if version is None or version.accepted is None or version.manifest is None:
            return False
        return version.manifest.attempt == version.accepted and self._num_sealed(version) == self._sealing

    def next_commit(self) -> Key | None:
        """The version to commit now: the newest ready one, or None. Call `start` with it."""
        if self._closed or self.in_flight is not None:
            return None
        ready = [number for number in self._versions if self.is_ready(number) and number >= (self._open or 0)]
        return self._key(max(ready)) if ready else None

    def next_early(self) -> tuple[Key, frozenset[str]] | None:
        """The version of which units may become live before the rest, and those units; None when there are none.

        That is the open version, else the oldest one that is accepted and has such units: a newer one overtakes it only
        when it is ready. Call `start` with some of the units, unless `next_commit` has a whole version.
        """
        if self._closed or self.in_flight is not None or self.poisoned or self.whole_next:
            return None
        for number in sorted(self._versions) if self._open is None else [self._open]:
            units = self._early_units(self._versions[number])
            if units:
                return self._key(number), units
        return None

    def is_part(self, key: Key, units: Collection[str]) -> bool:
        """Whether `units`, some of what `next_early` gave, can become live by themselves: others stay behind, and no
        rank has prepared them together with others."""
        return not self._is_rest(units) and not self._splits(key, units)

    def start(self, key: Key, part: Collection[str] = ()) -> tuple[str, ...] | None:
        """The ordered commit of `key`, or of `part` of it, is enqueued now.

        Returns the units that it has to write; None for every unit, whatever is live already.
        """
        if self.in_flight is not None or key.version <= self.live or key.version < (self._open or 0):
            raise ProtocolError(
                f"cannot commit {key}: in flight {self.in_flight}, live version {self.live}, open version {self._open}"
            )
        if part:
            self._check_part(key, part)
            self._open = key.version
        self.in_flight, self._part = key, tuple(part)
        if part:
            return self._part
        is_rest = self._open == key.version and not self.poisoned and not self.whole_next
        return tuple(unit for unit in self.holders if unit not in self._ahead) if is_rest else None

    def finish(self, ok: bool) -> tuple[int, ...]:
        """All ranks replied. Returns the versions that were overtaken and are dropped, oldest first.

        When a rank failed the engine is poisoned until a version is committed whole on all ranks: a later one, or that
        of which a part failed.
        """
        assert self.in_flight is not None, "finish without start"
        done, self.in_flight = self.in_flight.version, None
        self.poisoned = not ok
        if self._part:
            self._ahead, self._part = {**self._ahead, **dict.fromkeys(self._part)}, ()
            return ()
        overtaken = tuple(sorted(number for number in self._versions if self.live < number < done))
        self.skip_to(done)
        return overtaken

    def skip_to(self, version: int) -> None:
        """`version` is live in every unit (committed, its bytes were compared, or the host loaded it whole)."""
        self.live = max(self.live, version)
        self._open, self._ahead, self.whole_next = None, {}, False
        self._versions = {number: v for number, v in self._versions.items() if number > self.live}
        self._withdrawn = {key for key in self._withdrawn if key.version > self.live}

    def close(self) -> None:
        """No further commit starts."""
        self._closed = True

    def _key(self, number: int) -> Key:
        attempt = self._versions[number].accepted
        assert attempt is not None, f"version {number} is not accepted"
        return Key(self.terms.incarnation, number, attempt)

    def _early_units(self, version: _Version) -> frozenset[str]:
        """Units that every rank which holds them has sealed in the accepted attempt, and that are not live yet."""
        if version.accepted is None:
            return frozenset()
        return frozenset(version.everywhere[version.accepted] - self._ahead.keys())

    def _is_rest(self, units: Collection[str]) -> bool:
        """Nothing would stay behind."""
        return len(self._ahead) + len(units) >= len(self.holders)

    def _splits(self, key: Key, part: Collection[str]) -> bool:
        """Some rank has prepared units of `part` together with others: it was cut for another gate."""
        groups = [units for attempt, units in self._versions[key.version].groups if attempt == key.attempt]
        return any(not units.isdisjoint(part) and not units.issubset(part) for units in groups)

    def _check_part(self, key: Key, part: Collection[str]) -> None:
        if self._open is not None and key.version != self._open:
            raise ProtocolError(f"cannot commit units of version {key.version} while version {self._open} is open")
        version = self._versions.get(key.version)
        if version is None or version.accepted != key.attempt or not self._early_units(version).issuperset(part):
            raise ProtocolError(f"units of {key} are not sealed everywhere and accepted: {', '.join(part)}")
        if self._splits(key, part):
            raise ProtocolError(f"units of {key} are prepared together with others: {', '.join(part)}")
        if self._is_rest(part):
            raise ProtocolError(f"the last units of version {key.version} come with its manifest, not before")

    def _version(self, record: Sealed | UnitsSealed | Accepted | WeightsReady) -> _Version | None:
        if record.incarnation != self.terms.incarnation:
            raise ProtocolError(
                f"version {record.version} of incarnation {record.incarnation} in attachment {self.terms.attachment} "
                f"of incarnation {self.terms.incarnation}"
            )
        if record.version <= self.live or Key(record.incarnation, record.version, record.attempt) in self._withdrawn:
            return None
        return self._versions.setdefault(record.version, _Version())

    def _check_seal(self, record: Sealed | UnitsSealed) -> None:
        self._same_plan(record.plan_digest, f"engine rank {record.rank} sealed version {record.version}")
        if not 0 <= record.rank < self.world_size:
            raise ProtocolError(f"engine rank {record.rank} sealed a version, the engine has {self.world_size} ranks")

    def _same_plan(self, digest: str, who: str) -> None:
        if digest != self.terms.plan_digest:
            raise ProtocolError(f"{who} under plan {digest}, agreed was {self.terms.plan_digest}")

    def _num_sealed(self, version: _Version) -> int:
        return sum(attempt == version.accepted for attempt, _ in version.sealed)

    def _check_elements(self, number: int, version: _Version) -> None:
        manifest = version.manifest
        if manifest is None:
            return
        sealed = [r for (attempt, _), r in version.sealed.items() if attempt == manifest.attempt]
        total = sum(record.elements for record in sealed)
        if len(sealed) == self._sealing and total != manifest.elements:
            raise ProtocolError(f"version {number}: {total} elements sealed, its manifest says {manifest.elements}")
