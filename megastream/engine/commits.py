"""What of an attachment is committed next, what follows from the ranks' replies, and what the engine then holds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from megastream.engine.bond import NEVER, Bond, commit_errors, committed
from megastream.engine.contract import CommitRequest, CorePort
from megastream.engine.gates import Gates, Locked
from megastream.engine.settings import EngineSettings
from megastream.protocol.mix import Mix
from megastream.protocol.part_records import Mixed, PartCommitted, Pull, RankCommit
from megastream.protocol.records import Poisoned, Record
from megastream.protocol.staging import Key
from megastream.protocol.step_records import Withdrawn

logger = logging.getLogger(__name__)


class Commits:
    """One per coordinator, under whose lock every method is called. `done(bond, errors)` follows each commit."""

    def __init__(
        self,
        engine: str,
        world_size: int,
        core: CorePort,
        settings: EngineSettings,
        gates: Gates,
        *,
        post: Callable[[Record], None],
        locked: Locked,
        done: Callable[[Bond, list[str]], None],
    ) -> None:
        self._engine, self._world_size, self._core, self._settings = engine, world_size, core, settings
        self._gates, self._post, self._locked, self._done = gates, post, locked, done
        self.live: tuple[int, int] | None = None
        """(incarnation, version) of the newest update, also of one that is live in part; None until the first one."""
        self.mix: Mix | None = None
        """What live weights hold when not every unit is at `live`. Outlasts the attachment."""
        self.poisoned = False

    @property
    def is_one_version(self) -> bool:
        """Every unit is known to be of the same version."""
        return self.mix is None and not self.poisoned

    @property
    def serving(self) -> str:
        """For a log line: what goes on when an attachment ends."""
        if self.poisoned:
            return "the engine is poisoned"
        label = self._core.live_version() if self.mix is None else self.mix.label
        return f"version {label} keeps serving"

    def holds(self, incarnation: int, version: int) -> None:
        """Every unit is at this version: its bytes were compared, or the host loaded it whole."""
        self.live, self.mix, self.poisoned = (incarnation, version), None, False

    def not_over(self, version: int) -> str:
        """Why no overlay can be put over `version` now, or nothing."""
        if not self.is_one_version:
            return f"an overlay needs one version below it, and {self.serving}; a whole version has to come first"
        if (live := self._core.live_version()) != version:
            return f"engine {self._engine} serves version {live}, and the overlay is for version {version}"
        return ""

    def advance(self, bond: Bond) -> None:
        """Commits whatever may become live now. One commit at a time; the next one follows the replies."""
        table = bond.table
        assert table is not None
        if (key := table.next_commit()) is not None:
            self.commit(bond, key)
        elif (early := table.next_early()) is not None:
            key, units = early
            if part := self._gates.part(bond, key, units):
                self.commit(bond, key, part)

    def commit(self, bond: Bond, key: Key, part: tuple[str, ...] = ()) -> None:
        """Enqueues the ordered commit of a version, or of a part of it."""
        table = bond.table
        assert table is not None
        units = table.start(key, part)
        mix = table.mix if part else None
        bond.commit_by_s = time.monotonic() + self._settings.commit_s
        if bond.pulls:
            self.ask(bond, key)
        request = CommitRequest(bond.name, key.incarnation, key.version, key.attempt, units, mix, bond.attach.over)
        self._core.commit(request, lambda ranks: self._locked(lambda: self._committed(bond, request, part, ranks)))

    def ask(self, bond: Bond, key: Key) -> None:
        """The trainer sends what the ranks do not stage of this version; once for a version."""
        self._post(Pull(attachment=bond.name, **key._asdict()))

    def is_newer(self, incarnation: int, base: int) -> bool:
        """Whether a base version may be put over other bytes. Version 0 is the checkpoint that a fresh engine serves;
        one above it comes from a trainer that resumed."""
        return base > 0 if self.live is None else (incarnation, base) > self.live

    def withdrawn(self, bond: Bond, record: Withdrawn) -> None:
        """The version never becomes whole. Ranks forget it behind a commit of a part of it that may be under way."""
        table = bond.table
        assert table is not None
        key = Key(record.incarnation, record.version, record.attempt)
        if table.is_open(key):
            self._say_mixed(bond, "the trainer took the rest of it back")
        table.withdrawn(key)
        payload = {"attachment": bond.name, "version": key.version, "attempt": key.attempt}
        self._core.call_ranks("drop", payload, lambda replies: None)  # who is not bound any more has nothing to drop

    def tick(self, bond: Bond) -> None:
        """Looks whether the manifest of the version that is live in part is late."""
        if time.monotonic() > bond.manifest_by_s:
            self._say_mixed(bond, f"{self._settings.manifest_s:g} s later it is not complete")

    def end(self, bond: Bond) -> None:
        """The attachment is over, and no commit of it is under way."""
        self._say_mixed(bond, "its attachment has ended")

    def _say_mixed(self, bond: Bond, why: str) -> None:
        """Once for a version that is live in part: from here on only a whole version is committed."""
        table = bond.table
        if table is None or table.mix is None or table.whole_next or self.poisoned:
            return
        table.whole_next = True
        label, version = table.mix.label, table.mix.newest
        reason = (
            f"part of version {version} is live, and {why}; tokens are stamped {label} until the next complete version "
            f"is committed whole"
        )
        logger.error("engine %s serves a mix: %s", self._engine, reason)
        self._post(Mixed(attachment=bond.name, version=version, label=label, reason=reason))

    def _committed(
        self, bond: Bond, request: CommitRequest, part: tuple[str, ...], replies: tuple[RankCommit, ...]
    ) -> None:
        table, key = bond.table, Key(request.incarnation, request.version, request.attempt)
        assert table is not None
        bond.commit_by_s = NEVER
        if not part:
            bond.manifest_by_s = NEVER
        errors = commit_errors(replies, self._world_size)
        overtaken = table.finish(ok=not errors)
        if overtaken:
            logger.info("version %d overtook %s", key.version, overtaken)
        self.live = (key.incarnation, key.version)
        self.mix = None if errors else request.mix
        self.poisoned = bool(errors)
        if errors:
            self._poison(request, "; ".join(errors))
        elif part:
            self._part_committed(bond, request, part, replies)
        else:
            self._post(committed(bond.name, key, replies))
        self._done(bond, errors)

    def _part_committed(
        self, bond: Bond, request: CommitRequest, part: tuple[str, ...], replies: tuple[RankCommit, ...]
    ) -> None:
        if bond.manifest_by_s == NEVER:
            bond.manifest_by_s = time.monotonic() + self._settings.manifest_s
        self._post(
            PartCommitted(
                attachment=bond.name,
                incarnation=request.incarnation,
                version=request.version,
                units=part,
                label=request.label,
                ranks=replies,
                visible_unix_s=time.time(),
            )
        )

    def _poison(self, request: CommitRequest, errors: str) -> None:
        reason = f"commit of version {request.label} failed twice ({errors}); the next version is taken whole"
        logger.error("engine %s is poisoned: %s", self._engine, reason)
        self._core.poison(reason)
        is_part = request.mix is not None
        self._post(Poisoned(engine=self._engine, version=request.version, reason=reason, part=is_part))
