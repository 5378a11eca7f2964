"""What a trainer rank knows about its attachment from the log, and the manifest that rank 0 assembles from it."""

from __future__ import annotations

from collections import deque
from dataclasses import astuple

from megastream.plan.manifest import source_totals
from megastream.plan.types import Plan
from megastream.protocol.part_records import Pull
from megastream.protocol.records import (
    Attached,
    Bound,
    Committed,
    Detached,
    Emitted,
    Failed,
    LanesOpen,
    Poisoned,
    Record,
    WeightsReady,
)
from megastream.protocol.step_records import Connected, Withdrawn
from megastream.protocol.terms import ProtocolError

_KEPT_COMMITS = 16


class TrainerBook:
    """Takes the records of one attachment in log order; records of others are not for it and are ignored."""

    def __init__(self, attachment: str, engine: str, trainer_ranks: int, engine_ranks: int) -> None:
        self.attachment, self.engine = attachment, engine
        self.num_ranks = {"trainer": trainer_ranks, "engine": engine_ranks}
        self.bound: dict[tuple[str, int], Bound] = {}
        self.emitted: dict[tuple[int, int], dict[int, Emitted]] = {}
        """By (version, attempt), then by rank; of what has not settled."""
        self.committed: deque[Committed] = deque(maxlen=_KEPT_COMMITS)
        """The newest ones, oldest first."""
        self.connected: set[int] = set()
        """Trainer ranks whose lanes are open, of an engine that came late."""
        self.whole_version = -1
        """The newest one that has a manifest."""
        self.settled = (-1, -1)
        """The newest (version, attempt) that has a manifest or was withdrawn: no rank has it on a lane any more."""
        self.asked = (-1, -1)
        """The newest (version, attempt) of which the engine's commit has asked for what it pulls."""
        self.lanes_open: LanesOpen | None = None
        self.attached: Attached | None = None
        self.detached: Detached | None = None
        self.failed: Failed | None = None
        self.poisoned: Poisoned | None = None

    def take(self, record: Record) -> None:
        if isinstance(record, Poisoned) and record.engine == self.engine:
            self.poisoned = record
        if getattr(record, "attachment", None) != self.attachment:
            return
        match record:
            case Emitted() | Pull() | Committed() | WeightsReady() | Withdrawn():
                self._take_version(record)
            case Bound():
                self.bound[record.side, record.rank] = record
            case LanesOpen():
                self.lanes_open = record
            case Connected():
                self.connected.add(record.rank)
            case Attached():
                self.attached = record
            case Detached():
                self.detached = record
            case Failed():
                self.failed = self.failed or record

    def _take_version(self, record: Emitted | Pull | Committed | WeightsReady | Withdrawn) -> None:
        match record:
            case Pull():
                self.asked = (record.version, record.attempt)
            case Emitted() if (record.version, record.attempt) > self.settled:
                self.emitted.setdefault((record.version, record.attempt), {})[record.rank] = record
            case Committed():
                self.committed.append(record)
            case WeightsReady():
                self.whole_version = record.version
                self._settle(record)
            case Withdrawn():
                self._settle(record)

    def _settle(self, end: WeightsReady | Withdrawn) -> None:
        self.settled = (end.version, end.attempt)
        self.emitted = {key: ranks for key, ranks in self.emitted.items() if key > self.settled}

    @property
    def is_over(self) -> bool:
        """Nothing more is sent: it failed, or the engine has answered its end."""
        return self.failed is not None or self.detached is not None

    @property
    def pulled(self) -> dict[int, frozenset[str]]:
        """Units that the engine's commit asks for, by engine rank; ranks without any are left out."""
        bound = {rank: record.pulled for (side, rank), record in self.bound.items() if side == "engine"}
        return {rank: frozenset(units) for rank, units in bound.items() if units}

    @property
    def is_connected(self) -> bool:
        """The lanes of every trainer rank are open."""
        return len(self.connected) == self.num_ranks["trainer"]

    @property
    def live_version(self) -> int:
        """The newest version known to be live on the engine, -1 before the first."""
        versions = [record.version for record in self.committed]
        return max([*versions, self.attached.version if self.attached else -1])

    def committed_at(self, version: int) -> Committed | None:
        """The commit that made `version` or a newer one live; the first of those that are kept."""
        return next((record for record in self.committed if record.version >= version), None)

    def is_poisoned_by(self, version: int) -> bool:
        """The engine could not take this version, and no later one is live yet."""
        if self.poisoned is None or self.poisoned.version != version or self.poisoned.part:
            return False
        return self.committed_at(version) is None

    def not_bound(self) -> list[str]:
        """Who has not built the plan yet, e.g. ["trainer rank 3", "engine rank 1"]."""
        everybody = [(side, rank) for side, n in self.num_ranks.items() for rank in range(n)]
        return [f"{side} rank {rank}" for side, rank in everybody if (side, rank) not in self.bound]

    def agreed_digest(self) -> str:
        """The one digest that every rank built. ProtocolError names two ranks that differ."""
        (first_who, first), *others = sorted(self.bound.items())
        for who, bound in others:
            if bound.digest != first.digest:
                raise ProtocolError(
                    f"plans differ: {first_who[0]} rank {first_who[1]} built {first.digest}, {who[0]} rank {who[1]} "
                    f"built {bound.digest}; run the same megastream version and settings on both sides"
                )
        return first.digest

    def not_emitted(self, version: int, attempt: int) -> list[str]:
        """Trainer ranks whose pieces of (version, attempt) are not all out."""
        there = self.emitted.get((version, attempt), {})
        return [f"trainer rank {rank}" for rank in range(self.num_ranks["trainer"]) if rank not in there]

    def manifest(
        self, plan: Plan, incarnation: int, version: int, attempt: int, train_step: int
    ) -> WeightsReady | Withdrawn:
        """What becomes of a version that every rank emitted: its manifest, or that a rank has withdrawn it. What is
        pulled is not emitted, and the manifest's elements are without it.

        ProtocolError when it is not what the plan asks for.
        """
        emitted = self.emitted[version, attempt]
        if any(record.withdrawn for record in emitted.values()):
            return Withdrawn(attachment=self.attachment, incarnation=incarnation, version=version, attempt=attempt)
        pulled = self.pulled
        planned = source_totals(plan, pulled)
        for rank, record in sorted(emitted.items()):
            totals = planned[rank]
            if (record.pieces, record.elements, record.payload_bytes) != astuple(totals):
                raise ProtocolError(
                    f"version {version}, attempt {attempt}: trainer rank {rank} emitted {record.pieces} pieces with "
                    f"{record.elements} elements in {record.payload_bytes} bytes, the plan has {totals.pieces} pieces "
                    f"with {totals.elements} elements in {totals.payload_bytes} bytes"
                )
        return WeightsReady(
            attachment=self.attachment,
            incarnation=incarnation,
            version=version,
            attempt=attempt,
            train_step=train_step,
            plan_digest=plan.digest,
            units=plan.units,
            elements=sum(n for (unit, rank), n in plan.elements.items() if unit not in pulled.get(rank, ())),
        )
