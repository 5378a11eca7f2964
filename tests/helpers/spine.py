"""Both sides in one process: agents and coordinator of a fake engine, trainer ranks as threads, real gloo lanes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megastream.engine.agent import RankAgent
from megastream.engine.contract import CommitRequest
from megastream.engine.coordinator import Coordinator
from megastream.engine.settings import EngineSettings
from megastream.plan.unit import experts_of
from megastream.protocol.mix import Gate
from megastream.protocol.records import Attach, RankCommit
from megastream.sync import TrainerSettings, TrainerSync
from megastream.transport.gloo import GlooReceiver
from tests.helpers.fake_engine import FakeCore, FakeLive
from tests.helpers.fake_trainer import FakeTrainer
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.synthetic import differing, engine_side, trainer_side

TRAINER = "tp1 pp2(2,1) ep2"
ENGINE_SETTINGS = EngineSettings(bind_s=10, transfer_s=5, liveness_s=20, commit_s=5, detach_s=5, poll_s=0.05)


def trainer_settings(launch: str, **changes: Any) -> TrainerSettings:
    times = dict(ready_s=10.0, bind_s=10.0, transfer_s=10.0, attach_s=10.0, detach_s=10.0)
    return TrainerSettings(launch=launch, piece_bytes=4096, experts_per_unit=2, **{**times, **changes})


@dataclass
class Engine:
    name: str
    store: MemoryStore
    lives: list[FakeLive]
    agents: list[RankAgent]
    core: FakeCore
    coordinator: Coordinator

    def records(self, kind: type) -> list[Any]:
        return [record for record in self.store.records if isinstance(record, kind)]

    def own(self, kind: type) -> list[Any]:
        """Records of this engine's attachments."""
        names = {record.attachment for record in self.records(Attach) if record.engine == self.name}
        return [record for record in self.records(kind) if record.attachment in names]

    def differing(self, version: int) -> list[str]:
        return [name for live in self.lives for name in differing(live.layout, live.buffers, version)]

    def watch(self) -> list[str]:
        """From now on holds live weights after each commit against what it says; names what differed."""
        found: list[str] = []

        def watched(commit: Any, live: FakeLive) -> Any:
            def run(request: CommitRequest) -> RankCommit:
                reply = commit(request)
                wrong = differing(live.layout, live.buffers, said_by(request))
                found.extend(f"version {request.label}: {name}" for name in wrong)
                return reply

            return run

        for agent, live in zip(self.agents, self.lives, strict=True):
            agent.commit = watched(agent.commit, live)  # type: ignore[method-assign]
        return found


def said_by(request: CommitRequest) -> Callable[[str], int]:
    """Tensor -> the version that it has behind this commit, by the names of the units of its mix."""
    vector = request.mix.vector() if request.mix is not None else {}

    def holds(unit: str, tensor: str) -> bool:
        parts = tensor.split(".")
        if parts[1] != "layers":
            return unit.endswith({"lm_head": ".head", "norm": ".norm", "embed_tokens": ".embed"}[parts[-2]])
        if f".l{parts[2]}." not in unit:
            return False
        experts = experts_of(unit)
        return (experts is not None and int(parts[5]) in experts[1]) if "experts" in parts else experts is None

    def version_of(tensor: str) -> int:
        if not vector:
            return request.version
        (version,) = {version for unit, version in vector.items() if holds(unit, tensor)}
        return version

    return version_of


@contextmanager
def engine(
    mesh: str,
    version: int = 0,
    settings: EngineSettings = ENGINE_SETTINGS,
    *,
    gate: Gate = "version",
    store: MemoryStore | None = None,
    name: str = "e",
) -> Iterator[Engine]:
    """One engine; several of them share a `store` under different names."""
    store = store or MemoryStore()
    lives = [FakeLive(layout, version) for layout in engine_side(mesh)]
    receivers = [GlooReceiver("127.0.0.1") for _ in lives]
    agents = [
        RankAgent(
            MemoryLog(store),
            engine=name,
            rank=rank,
            world_size=len(lives),
            live=live,
            receiver=receiver,
            settings=settings,
            gate=gate,
        )
        for rank, (live, receiver) in enumerate(zip(lives, receivers, strict=True))
    ]
    core = FakeCore(agents, at_once=settings.staging.is_given)
    coordinator = Coordinator(
        MemoryLog(store), engine=name, world_size=len(lives), core=core, settings=settings, gate=gate
    )
    for agent in agents:
        agent.start()
    coordinator.start()
    try:
        yield Engine(name, store, lives, agents, core, coordinator)
    finally:
        coordinator.close()
        core.close()
        for agent in agents:
            agent.close()
        for receiver in receivers:
            receiver.close()


Body = Callable[[TrainerSync, FakeTrainer], None]


def train(
    store: MemoryStore, body: Body, *, version: int = 0, settings: TrainerSettings, mesh: str = TRAINER
) -> list[BaseException | None]:
    """Runs `body` on every trainer rank, each in a thread; what each of them raised."""
    layouts = trainer_side(mesh)
    outcomes: list[BaseException | None] = [None] * len(layouts)

    def run(rank: int) -> None:
        trainer = FakeTrainer(layouts[rank], version)
        sync = TrainerSync(MemoryLog(store), rank=rank, world_size=len(layouts), trainer=trainer, settings=settings)
        try:
            body(sync, trainer)
        except BaseException as error:  # noqa: BLE001  handed to the test
            outcomes[rank] = error
        finally:
            sync.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(layouts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a trainer rank hangs"
    return outcomes


def eventually(check: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.02)
