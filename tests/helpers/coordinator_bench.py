"""A coordinator between a log in memory and an engine core that does what the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megastream.engine.contract import CommitRequest
from megastream.engine.coordinator import Coordinator
from megastream.engine.settings import EngineSettings
from megastream.protocol.bind import put_units
from megastream.protocol.mix import Gate
from megastream.protocol.part_records import GateSet, SetGate, UnitsSealed
from megastream.protocol.records import (
    Accepted,
    Attached,
    Bound,
    Compared,
    LanesOpen,
    RankCommit,
    Record,
    Sealed,
    WeightsReady,
)
from megastream.protocol.step_records import Withdrawn
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import PARTS, attach_record
from tests.helpers.spine import eventually

SETTINGS = EngineSettings(bind_s=5, liveness_s=20, commit_s=5, detach_s=5, poll_s=0.02)
STAGES = {stage: tuple(unit for unit in PARTS if unit.startswith(stage)) for stage in ("s0", "s1")}
Done = Callable[[tuple[RankCommit, ...]], None]


class ManualCore:
    """Keeps what it was asked for; the test answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[CommitRequest, Done]] = []
        self.called: list[tuple[str, dict[str, Any]]] = []
        self.errors: dict[str, str] = {}
        """Operation -> why every rank refuses it."""
        self.use: dict[str, float] = {}
        self.poisons: list[str] = []
        self.version = 0

    def commit(self, request: CommitRequest, done: Done) -> None:
        self.asked.append((request, done))

    def call_ranks(self, op: str, payload: dict[str, Any], done: Callable[[Any], None]) -> None:
        self.called.append((op, payload))
        done(({"done": True, "error": self.errors.get(op, ""), "use": self.use},) * 2)

    def poison(self, reason: str) -> None:
        self.poisons.append(reason)

    def live_version(self) -> int:
        return self.version

    def answer(self, ok: bool = True) -> None:
        request, done = self.asked.pop(0)
        if request.mix is None:
            self.version = request.version
        done(tuple(RankCommit(rank=rank, ok=ok, stall_s=0.0, step=1, error="" if ok else "no") for rank in range(2)))


class Bench:
    def __init__(self, store: MemoryStore, core: ManualCore, coordinator: Coordinator) -> None:
        self.store, self.core, self.log, self.coordinator = store, core, MemoryLog(store), coordinator

    def post(self, *records: Record) -> None:
        for record in records:
            self.log.append(record)

    def records(self, kind: type) -> list[Any]:
        return [record for record in self.store.records if isinstance(record, kind)]

    def version(self, number: int, incarnation: int = 1, attachment: str = "", **changes: Any) -> None:
        """All that makes a version ready."""
        name = _named(number, incarnation, attachment)
        digest = changes.get("digest", "digest")
        self.post(*(Sealed(**name, rank=r, plan_digest=digest, elements=5, prepare_s=0.0) for r in range(2)))
        self.post(Accepted(**name, train_step=0))
        self.post(WeightsReady(**name, train_step=0, plan_digest="digest", units=(), elements=10))

    def part(self, number: int, units: tuple[str, ...], attachment: str = "") -> None:
        """Every rank that holds any of these units has sealed them, together."""
        for rank in range(2):
            held = tuple(unit for unit in units if rank in PARTS[unit])
            self.post(UnitsSealed(**_named(number, 1, attachment), rank=rank, plan_digest="digest", units=held))

    def accept(self, number: int, attachment: str = "") -> None:
        self.post(Accepted(**_named(number, 1, attachment), train_step=0))

    def withdraw(self, number: int) -> None:
        self.post(Withdrawn(**_named(number, 1, "")))

    def bind(self, incarnation: int = 1, base: int = 0, **changes: Any) -> None:
        """Plan and lanes are there; the base version is not."""
        attachment = changes.get("attachment") or f"i{incarnation}"
        attach = attach_record(incarnation, base, **changes)
        self.post(attach)
        put_units(self.log, attach, tuple(PARTS))
        for rank in range(2):
            held = tuple(unit for unit, ranks in PARTS.items() if rank in ranks)
            self.post(Bound(attachment=attachment, side="engine", rank=rank, digest="digest", units=held))
        self.post(LanesOpen(attachment=attachment, digest="digest"))

    def compared(self, differing: int = 0, attachment: str = "i1") -> None:
        for rank in range(2):
            self.post(Compared(attachment=attachment, rank=rank, tensors=7, differing=differing, first="w"))

    def attach(self, incarnation: int = 1, base: int = 0, differing: int = 0, **changes: Any) -> None:
        attachment = changes.get("attachment") or f"i{incarnation}"
        self.bind(incarnation, base, **changes)
        self.version(base, incarnation, attachment)
        self.compared(differing, attachment)

    def live(self, incarnation: int = 1, attachment: str = "") -> None:
        name = attachment or f"i{incarnation}"
        eventually(lambda: any(r.attachment == name for r in self.records(Attached)))


def _named(version: int, incarnation: int, attachment: str) -> dict[str, Any]:
    attachment = attachment or f"i{incarnation}"
    return {"attachment": attachment, "incarnation": incarnation, "version": version, "attempt": 0}


@contextmanager
def bench(settings: EngineSettings = SETTINGS, gate: Gate = "version") -> Iterator[Bench]:
    store, core = MemoryStore(), ManualCore()
    coordinator = Coordinator(MemoryLog(store), engine="e", world_size=2, core=core, settings=settings, gate=gate)
    coordinator.start()
    try:
        yield Bench(store, core, coordinator)
    finally:
        coordinator.close()


def asked(b: Bench) -> CommitRequest:
    """The one commit that the core was asked for."""
    eventually(lambda: len(b.core.asked) == 1)
    return b.core.asked[0][0]


def nothing_asked(b: Bench) -> None:
    """Once the coordinator has read all there is."""
    request = f"look {len(b.store.records)}"
    b.post(SetGate(engine="e", gate="nothing", request=request))
    eventually(lambda: any(record.request == request for record in b.records(GateSet)))
    assert b.core.asked == []
