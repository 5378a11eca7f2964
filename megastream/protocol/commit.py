"""When a version may become live, decided for one engine over all its ranks. No threads, no clocks, no bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from megastream.protocol.records import Accepted, Sealed, WeightsReady
from megastream.protocol.staging import Key
from megastream.protocol.terms import ProtocolError, Terms


@dataclass(slots=True)
class _Version:
    sealed: dict[tuple[int, int], Sealed] = field(default_factory=dict)
    accepted: int | None = None
    manifest: WeightsReady | None = None


class CommitTable:
    """The versions of one attachment as the engine's coordinator sees them.

    A version is ready when it is accepted, its manifest is there, and every rank sealed the accepted attempt under
    the same plan. The newest ready version goes first and older ones are dropped as a whole; at most one commit is
    under way; nothing goes backwards. Records may arrive in any order. ProtocolError names a contradiction.
    """

    def __init__(self, terms: Terms, world_size: int) -> None:
        self.terms, self.world_size = terms, world_size
        self.live = terms.base_version - 1
        self.in_flight: Key | None = None
        self.poisoned = False
        self._closed = False
        self._versions: dict[int, _Version] = {}
        """Only what is newer than `live`."""

    @property
    def is_drained(self) -> bool:
        """No commit is under way, and none will start."""
        return self._closed and self.in_flight is None

    def sealed(self, record: Sealed) -> None:
        version = self._version(record)
        if version is None:
            return
        self._same_plan(record.plan_digest, f"engine rank {record.rank} sealed version {record.version}")
        if not 0 <= record.rank < self.world_size:
            raise ProtocolError(f"engine rank {record.rank} sealed a version, the engine has {self.world_size} ranks")
        version.sealed[record.attempt, record.rank] = record
        self._check_elements(record.version, version)

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

    def is_ready(self, number: int) -> bool:
        """All that a commit of this version needs is there."""
        version = self._versions.get(number)
        if version is None or version.accepted is None or version.manifest is None:
            return False
        return version.manifest.attempt == version.accepted and self._num_sealed(version) == self.world_size

    def next_commit(self) -> Key | None:
        """The version to commit now: the newest ready one, or None. Call `start` with it."""
        if self._closed or self.in_flight is not None:
            return None
        ready = [number for number in self._versions if self.is_ready(number)]
        if not ready:
            return None
        newest = max(ready)
        attempt = self._versions[newest].accepted
        assert attempt is not None
        return Key(self.terms.incarnation, newest, attempt)

    def start(self, key: Key) -> None:
        """The ordered commit of `key` was enqueued."""
        if self.in_flight is not None or key.version <= self.live:
            raise ProtocolError(f"cannot commit {key}: in flight {self.in_flight}, live version {self.live}")
        self.in_flight = key

    def finish(self, ok: bool) -> tuple[int, ...]:
        """All ranks replied. Returns the versions that were overtaken and are dropped, oldest first.

        When a rank failed the engine is poisoned until a later version commits on all ranks.
        """
        assert self.in_flight is not None, "finish without start"
        done, self.in_flight = self.in_flight.version, None
        overtaken = tuple(sorted(number for number in self._versions if self.live < number < done))
        self.live = done
        self.poisoned = not ok
        self._versions = {number: v for number, v in self._versions.items() if number > done}
        return overtaken

    def skip_to(self, version: int) -> None:
        """`version` is already live (its bytes were compared, or the host loaded it whole)."""
        self.live = max(self.live, version)
        self._versions = {number: v for number, v in self._versions.items() if number > self.live}

    def close(self) -> None:
        """No further commit starts."""
        self._closed = True

    def _version(self, record: Sealed | Accepted | WeightsReady) -> _Version | None:
        if record.incarnation != self.terms.incarnation:
            raise ProtocolError(
                f"version {record.version} of incarnation {record.incarnation} in attachment {self.terms.attachment} "
                f"of incarnation {self.terms.incarnation}"
            )
        return None if record.version <= self.live else self._versions.setdefault(record.version, _Version())

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
        if len(sealed) == self.world_size and total != manifest.elements:
            raise ProtocolError(f"version {number}: {total} elements sealed, its manifest says {manifest.elements}")
