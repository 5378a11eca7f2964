"""The coordinator of one engine: a thread in the engine core's process that follows the log and orders commits.

It decides, it never waits: replies of the core come back through callbacks, deadlines are looked at between reads of
the log. Whatever breaks ends the attachment; the engine goes on serving the version it has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from megastream.engine.bond import Bond, Phase, admit
from megastream.engine.commits import Commits
from megastream.engine.comparing import Comparing
from megastream.engine.contract import CorePort
from megastream.engine.gates import Gates
from megastream.engine.settings import EngineSettings
from megastream.protocol.control import ControlLog
from megastream.protocol.follow import Follower, Outbox
from megastream.protocol.mix import Gate
from megastream.protocol.part_records import SetGate
from megastream.protocol.records import (
    Attach,
    Attached,
    Committed,
    Compared,
    Detached,
    Failed,
    LanesOpen,
    Record,
    TrainingFinished,
)
from megastream.protocol.staging import Key
from megastream.protocol.step_records import Withdrawn
from megastream.protocol.terms import ProtocolError

logger = logging.getLogger(__name__)


class Coordinator:
    """One per engine core. `start` when the core can take calls; `close` before it exits."""

    def __init__(
        self,
        log: ControlLog,
        *,
        engine: str,
        world_size: int,
        core: CorePort,
        settings: EngineSettings,
        gate: Gate = "version",
    ) -> None:
        """`gate` is the one with which the ranks' agents started; SetGate changes it."""
        self.engine, self.world_size = engine, world_size
        self._run_id, self._core, self._settings = log.run_id, core, settings
        self._lock = threading.RLock()
        self._bond: Bond | None = None
        self._next: Attach | None = None
        self._outbox = Outbox(log, "coordinator", retry_s=settings.retry_s)
        post, locked = self._outbox.post, self._under_lock
        self._gates = Gates(engine, core, settings, gate, post=post, locked=locked, advance=self._advance)
        self._commits = Commits(
            engine, world_size, core, settings, self._gates, post=post, locked=locked, done=self._after_commit
        )
        self._comparing = Comparing(core, self._commits, locked=locked, failed=self._not_compared)
        self._follower = Follower(
            log,
            "coordinator",
            take=self._take,
            refused=self._refused,
            tick=self._tick,
            lost=self._lost,
            poll_s=settings.poll_s,
            retry_s=settings.retry_s,
        )

    def start(self) -> None:
        self._outbox.start()
        self._follower.start()

    def close(self) -> None:
        """Ends the threads; an attachment that is still there is failed, so that its trainer does not wait."""
        self._follower.stop()
        with self._lock:
            if self._bond is not None:
                self._fail(self._bond, "the engine is shutting down")
        self._outbox.close()

    # ---- records, in the follower's thread

    def _take(self, record: Record) -> None:
        with self._lock:
            if isinstance(record, Attach):
                if record.engine == self.engine:
                    self._attach(record)
                return
            if isinstance(record, SetGate):
                if record.engine == self.engine:
                    self._gates.choose(record)
                return
            bond = self._bond
            if bond is None or getattr(record, "attachment", None) != bond.name:
                return
            bond.heard_s = time.monotonic()
            try:
                self._take_own(bond, record)
            except ProtocolError as error:
                self._fail(bond, str(error))
            self._advance()

    def _take_own(self, bond: Bond, record: Record) -> None:
        bond.take(record)
        match record:
            case LanesOpen() if bond.table is None:
                bond.open(self._run_id, record.digest, self.world_size)
            case Compared() if record.rank not in bond.compared:
                bond.compared[record.rank] = record
                if len(bond.compared) == self.world_size:
                    self._judge(bond)
            case Committed() if bond.attach.kind == "whole":
                self._loaded_whole(bond, record)
            case Withdrawn() if bond.table is not None and bond.attach.kind == "stream":
                self._commits.withdrawn(bond, record)
            case TrainingFinished():
                bond.finish = record
                bond.finish_by_s = time.monotonic() + self._settings.detach_s
            case Failed() if not bond.failed:
                self._failed(bond, record.reason)

    def _attach(self, record: Attach) -> None:
        now = time.monotonic()
        try:
            admit(record, self.engine, self._bond, self._commits.live, now)
        except ProtocolError as error:
            self._turn_away(record, str(error))
            return
        if self._bond is None:
            self._begin(record)
            return
        self._next = record
        if not self._bond.is_over(now):
            self._fail(self._bond, f"superseded by incarnation {record.incarnation}")
        self._advance()

    def _turn_away(self, record: Attach, reason: str) -> None:
        self._post_failed(record.attachment, reason)
        self._outbox.post(Detached(attachment=record.attachment, engine=self.engine))

    def _refused(self, record: Record | None, reason: str) -> None:
        """Whatever a record held, it ends its attachment at most."""
        with self._lock:
            bond = self._bond
            if bond is not None and getattr(record, "attachment", bond.name) == bond.name:
                self._fail(bond, f"engine {self.engine} {reason}")
            elif isinstance(record, Attach):
                self._turn_away(record, f"engine {self.engine} {reason}")

    def _begin(self, record: Attach) -> None:
        now = time.monotonic()
        self._next = None
        self._bond = Bond(record, heard_s=now, bind_by_s=now + self._settings.bind_s)

    # ---- what follows; under the lock, from the follower or from the core's callbacks

    def _advance(self) -> None:
        bond = self._bond
        if bond is None:
            return
        table = bond.table
        if not bond.failed and table is not None and bond.attach.kind == "stream":
            key = table.next_commit()
            if bond.phase is Phase.BASE and key is not None:
                bond.base = key.version
                self._take_base(bond, key)
            elif bond.phase is Phase.LIVE:
                self._commits.advance(bond)
        self._end_if_over(bond)

    def _end_if_over(self, bond: Bond) -> None:
        if not bond.is_over(time.monotonic()):
            return
        if not bond.failed and bond.finish is not None and not bond.is_at(bond.finish.version):
            logger.warning("the last version %d did not become live; %s", bond.finish.version, self._commits.serving)
        if bond.table is not None:
            bond.table.close()
            if not bond.table.is_drained:
                return
        self._commits.end(bond)
        self._outbox.post(Detached(attachment=bond.name, engine=self.engine))
        self._bond = None
        if self._next is not None:
            self._begin(self._next)

    def _take_base(self, bond: Bond, key: Key) -> None:
        """Compares a base version that has every tensor; one that has some only is put over the live one as it is."""
        if bond.attach.over < 0:
            bond.phase = Phase.COMPARING
            self._comparing.start(bond, key)
        elif refusal := self._commits.not_over(bond.attach.over):
            self._fail(bond, refusal)
        else:
            bond.phase = Phase.REPLACING
            self._commits.commit(bond, key)

    def _not_compared(self, bond: Bond, reason: str) -> None:
        if self._bond is bond:
            self._fail(bond, reason)
            self._advance()

    def _judge(self, bond: Bond) -> None:
        """Every rank has compared the base version with its live weights."""
        assert bond.table is not None
        commits, base, incarnation = self._commits, bond.base, bond.attach.incarnation
        differing = sum(record.differing for record in bond.compared.values())
        if not differing and bond.is_compared and self._core.live_version() == base and commits.is_one_version:
            bond.table.skip_to(base)
            commits.holds(incarnation, base)
            self._attached(bond, replaced=False)
            return
        if differing and not commits.is_newer(incarnation, base) and commits.is_one_version:
            bond.refuse_difference(self.engine)
        bond.phase = Phase.REPLACING
        key = bond.table.next_commit()
        assert key is not None
        bond.base = key.version
        commits.commit(bond, key)

    def _attached(self, bond: Bond, *, replaced: bool) -> None:
        bond.phase = Phase.LIVE
        logger.info("attachment %s is live at version %d", bond.name, bond.base)
        self._outbox.post(Attached(attachment=bond.name, engine=self.engine, version=bond.base, replaced=replaced))

    def _after_commit(self, bond: Bond, errors: list[str]) -> None:
        if bond.phase is Phase.REPLACING and errors:
            self._fail(bond, f"engine {self.engine} could not take the base version: {'; '.join(errors)}")
        elif bond.phase is Phase.REPLACING and not bond.failed:
            differed = any(record.differing for record in bond.compared.values())
            self._attached(bond, replaced=differed or bond.attach.over >= 0)
        self._advance()

    def _under_lock(self, call: Callable[[], None]) -> None:
        with self._lock:
            call()

    def _loaded_whole(self, bond: Bond, record: Committed) -> None:
        """The host paused, loaded and resumed; the version is live on every rank."""
        if bond.table is None or record.version <= bond.table.live:
            return
        bond.table.skip_to(record.version)
        self._commits.holds(record.incarnation, record.version)
        if bond.phase is Phase.BASE:
            self._attached(bond, replaced=True)

    # ---- deadlines

    def _tick(self) -> None:
        with self._lock:
            bond, now = self._bond, time.monotonic()
            if bond is None:
                return
            if not bond.failed and (late := bond.late(now, self._settings)):
                self._fail(bond, late)
            self._commits.tick(bond)
            self._advance()

    def _fail(self, bond: Bond, reason: str) -> None:
        if not bond.failed:
            self._post_failed(bond.name, reason)
            self._failed(bond, reason)

    def _failed(self, bond: Bond, reason: str) -> None:
        bond.failed = reason
        logger.warning("attachment %s ended: %s; %s", bond.name, reason, self._commits.serving)

    def _post_failed(self, attachment: str, reason: str) -> None:
        self._outbox.post(Failed(attachment=attachment, side="core", rank=-1, reason=reason))

    def _lost(self, reason: str) -> None:
        with self._lock:
            if self._bond is not None:
                self._fail(self._bond, f"engine {self.engine} had lost the control plane: {reason}")
