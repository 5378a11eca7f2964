"""The one attachment that an engine has, as its coordinator sees it: phase, deadlines, what ends it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from megastream.engine.settings import EngineSettings
from megastream.protocol.commit import CommitTable
from megastream.protocol.part_records import UnitsSealed
from megastream.protocol.records import (
    Accepted,
    Attach,
    Bound,
    Committed,
    Compared,
    RankCommit,
    Record,
    Sealed,
    TrainingFinished,
    WeightsReady,
)
from megastream.protocol.staging import Key
from megastream.protocol.terms import ProtocolError, Terms, check_terms

NEVER = float("inf")


class Phase(Enum):
    BINDING = "building the plan"
    BASE = "receiving the base version"
    COMPARING = "comparing the base version with the live weights"
    REPLACING = "committing the base version"
    LIVE = "live"


@dataclass
class Bond:
    """Times are of the monotonic clock, in seconds."""

    attach: Attach
    heard_s: float
    bind_by_s: float
    phase: Phase = Phase.BINDING
    table: CommitTable | None = None
    base: int = -1
    """The version to compare: a late joiner's is the first that is whole here, its attachment's or a newer one."""
    compared: dict[int, Compared] = field(default_factory=dict)
    holders: dict[str, set[int]] = field(default_factory=dict)
    """Engine ranks that hold a part of each of the plan's units, in plan order."""
    pulls: bool = False
    """Some rank does not stage everything: each commit asks the trainer for the rest."""
    is_compared: bool = True
    """The base version is compared in every unit, or will be."""
    commit_by_s: float = NEVER
    manifest_by_s: float = NEVER
    """Until when the version that is live in part has to be complete."""
    finish: TrainingFinished | None = None
    finish_by_s: float = NEVER
    failed: str = ""

    @property
    def name(self) -> str:
        return self.attach.attachment

    def take(self, record: Record) -> None:
        """What ranks and trainer say about units and versions. ProtocolError for a contradiction."""
        if isinstance(record, Bound) and record.side == "engine":
            self.pulls = self.pulls or bool(record.pulled)
            for unit in record.units:
                self.holders.setdefault(unit, set()).add(record.rank)
        if self.table is None:
            return
        match record:
            case Sealed() if self.attach.kind == "stream":
                self.table.sealed(record)
            case UnitsSealed() if self.attach.kind == "stream":
                self.table.units_sealed(record)
            case Accepted():
                self.table.accepted(record)
            case WeightsReady():
                self.table.manifest(record)

    def open(self, run_id: str, digest: str, world_size: int) -> None:
        """All ranks built the same plan; the base version is on its way."""
        terms = Terms(
            run_id=run_id,
            attachment=self.name,
            incarnation=self.attach.incarnation,
            kind=self.attach.kind,
            plan_digest=digest,
            base_version=self.attach.base_version,
        )
        self.table = CommitTable(terms, world_size, self.holders)
        self.phase = Phase.BASE

    def is_over(self, now: float) -> bool:
        """It failed, or training finished and the last version is live or late."""
        if self.failed:
            return True
        if self.finish is None:
            return False
        return self.is_at(self.finish.version) or now > self.finish_by_s

    def is_at(self, version: int) -> bool:
        """`version` or a newer one of this attachment is live."""
        return self.table is not None and self.table.live >= version

    def late(self, now: float, settings: EngineSettings) -> str:
        """Why a deadline ends this attachment now, or nothing."""
        if self.phase is Phase.BINDING and now > self.bind_by_s:
            return f"the engine waited {settings.bind_s:g} s for the trainer to open its lanes"
        if now > self.commit_by_s:
            return f"a commit was enqueued {settings.commit_s:g} s ago and the engine's ranks have not replied"
        if now - self.heard_s > settings.liveness_s and self.finish is None:
            return f"the engine heard nothing from the trainer for {settings.liveness_s:g} s"
        return ""

    def refuse_difference(self, engine: str) -> None:
        """ProtocolError that names what differs, for weights which must not be written over."""
        worst = next(record for _, record in sorted(self.compared.items()) if record.differing)
        raise ProtocolError(
            f"version {self.base} is not what engine {engine} serves: {worst.differing} of "
            f"{worst.tensors} tensors differ on engine rank {worst.rank}, first {worst.first}; start both from the "
            f"same checkpoint"
        )


def admit(attach: Attach, engine: str, held: Bond | None, live: tuple[int, int] | None, now: float) -> None:
    """ProtocolError when `engine` cannot take this Attach. `live` is (incarnation, version) of its last update."""
    check_terms(attach)
    if live is not None and (attach.incarnation, attach.base_version) < live:
        raise ProtocolError(
            f"engine {engine} has version {live[1]} of incarnation {live[0]} live; base version "
            f"{attach.base_version} of incarnation {attach.incarnation} would go backwards"
        )
    is_overlay = attach.over >= 0  # ends nobody's attachment
    if held is not None and not held.is_over(now) and (is_overlay or attach.incarnation <= held.attach.incarnation):
        raise ProtocolError(
            f"engine {engine} is attached to incarnation {held.attach.incarnation} ({held.name}); incarnation "
            f"{attach.incarnation} can attach once that has finished"
        )


def commit_errors(replies: Sequence[RankCommit], world_size: int) -> list[str]:
    """Why a commit did not succeed everywhere; empty when it did."""
    errors = [f"rank {reply.rank}: {reply.error}" for reply in replies if not reply.ok]
    if len(replies) != world_size:
        errors.append(f"{len(replies)} of {world_size} ranks replied")
    return errors


def committed(attachment: str, key: Key, replies: tuple[RankCommit, ...]) -> Committed:
    """The record of a commit that has just succeeded on every rank."""
    return Committed(
        attachment=attachment,
        incarnation=key.incarnation,
        version=key.version,
        ranks=replies,
        visible_unix_s=time.time(),
    )
