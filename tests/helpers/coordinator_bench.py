"""A coordinator between a log in memory and an engine core that does what the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megastream.engine.contract import CommitRequest
from megastream.engine.coordinator import Coordinator
from megastream.engine.settings import EngineSettings
from megastream.protocol.records import (
    Accepted,
    Attached,
    Compared,
    LanesOpen,
    RankCommit,
    Record,
    Sealed,
    WeightsReady,
)
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import attach_record
from tests.helpers.spine import eventually

SETTINGS = EngineSettings(bind_s=5, liveness_s=20, commit_s=5, detach_s=5, poll_s=0.02)
Done = Callable[[tuple[RankCommit, ...]], None]


class ManualCore:
    """Keeps what it was asked for; the test answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[CommitRequest, Done]] = []
        self.poisons: list[str] = []
        self.version = 0

    def commit(self, request: CommitRequest, done: Done) -> None:
        self.asked.append((request, done))

    def call_ranks(self, op: str, payload: dict[str, Any], done: Callable[[Any], None]) -> None:
        done(({"done": True, "error": ""},) * 2)

    def poison(self, reason: str) -> None:
        self.poisons.append(reason)

    def live_version(self) -> int:
        return self.version

    def answer(self, ok: bool = True) -> None:
        request, done = self.asked.pop(0)
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

    def version(self, number: int, incarnation: int = 1, **changes: Any) -> None:
        """All that makes a version ready."""
        name = {"attachment": f"i{incarnation}", "incarnation": incarnation, "version": number, "attempt": 0}
        digest = changes.get("digest", "digest")
        self.post(*(Sealed(**name, rank=r, plan_digest=digest, elements=5, prepare_s=0.0) for r in range(2)))
        self.post(Accepted(**name, train_step=0))
        self.post(WeightsReady(**name, train_step=0, plan_digest="digest", units=(), elements=10))

    def attach(self, incarnation: int = 1, base: int = 0, differing: int = 0, **changes: Any) -> None:
        self.post(attach_record(incarnation, base, **changes))
        self.post(LanesOpen(attachment=f"i{incarnation}", digest="digest"))
        self.version(base, incarnation)
        for rank in range(2):
            self.post(Compared(attachment=f"i{incarnation}", rank=rank, tensors=7, differing=differing, first="w"))

    def live(self, incarnation: int = 1) -> None:
        eventually(lambda: any(r.attachment == f"i{incarnation}" for r in self.records(Attached)))


@contextmanager
def bench(settings: EngineSettings = SETTINGS) -> Iterator[Bench]:
    store, core = MemoryStore(), ManualCore()
    coordinator = Coordinator(MemoryLog(store), engine="e", world_size=2, core=core, settings=settings)
    coordinator.start()
    try:
        yield Bench(store, core, coordinator)
    finally:
        coordinator.close()
