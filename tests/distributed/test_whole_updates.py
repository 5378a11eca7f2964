"""Gate `pause`: the host pauses, every rank loads the whole version over the lanes, the host resumes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from megastream.engine.contract import WholeLoad
from megastream.protocol.records import Accepted, Emitted, EngineReady, Failed
from megastream.sync import EngineSync, EngineSyncSettings, SyncError, TrainerSync, WholeUpdate
from megastream.sync import engine as sync_engine
from tests.helpers.fake_engine import FakeLive
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import attach_record
from tests.helpers.spine import Engine, engine, eventually, train, trainer_settings
from tests.helpers.synthetic import fill, full_tensor


class Pausable:
    """The calls of AsyncLLM that a paused update makes, over the agents of a fake engine."""

    def __init__(self, agents: list[Any]) -> None:
        self.agents, self.calls = agents, []

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))
        await asyncio.sleep(0.02)

    async def start_weight_update(self) -> None:
        self.calls.append(("start",))

    async def update_weights(self, request: Any) -> None:
        loads = [asyncio.to_thread(agent.load_whole, **request.update_info) for agent in self.agents]
        await asyncio.gather(*loads)

    async def finish_weight_update(self) -> None:
        self.calls.append(("finish",))

    async def resume_generation(self) -> None:
        self.calls.append(("resume",))


@dataclass
class Host:
    llm: Pausable
    updates: list[WholeUpdate] = field(default_factory=list)
    error: str = ""


@contextmanager
def following(e: Engine, settings: EngineSyncSettings | None = None) -> Iterator[Host]:
    """The process that owns the engine: updates it until the attachment is detached or an update fails."""
    host = Host(Pausable(e.agents))

    def run() -> None:
        sync = EngineSync(MemoryLog(e.store), engine="e", settings=settings)
        try:
            host.updates.extend(asyncio.run(sync.run_whole_updates(host.llm)))
        except SyncError as error:
            host.error = str(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield host
    thread.join(10)
    assert not thread.is_alive()


def whole_is(live: FakeLive, version: int) -> bool:
    """Every full tensor that the engine's loader was given is that of `version`."""
    return bool(live.whole) and all(full_tensor(name, version).equal(tensor) for name, tensor in live.whole.items())


def test_whole_updates_pause_load_and_resume() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach("whole")
        for version in (1, 2):
            train_step(sync, trainer, version)
            sync.wait_committed(version, 10)
            assert all(whole_is(live, version) for live in e.lives)
        sync.finished("done")

    with engine("tp2 ep2") as e:
        with following(e) as host:
            assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        llm, updates = host.llm, host.updates
        assert [update.version for update in updates] == [0, 1, 2]
        assert all(update.stall_s > 0 and update.repair_s == 0.002 for update in updates)
        assert llm.calls[-4:] == [("pause", "keep", False), ("start",), ("finish",), ("resume",)]


def test_a_whole_update_that_breaks_off_is_not_resumed() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach("whole")
        sync.begin(1, 1)
        sync.accept()
        eventually(lambda: host.llm.calls.count(("start",)) == 2)
        if sync.rank == 3:
            raise ZeroDivisionError("injected")
        sync.wait_committed(1, 10)

    with engine("tp1 pp2") as e:
        with following(e) as host:
            outcomes = train(e.store, body, settings=trainer_settings("a"))
        assert "version 1" in host.error and "trainer rank 3" in str(outcomes[0])
        assert host.llm.calls[-1] == ("start",), "not resumed"


def test_a_loader_that_finds_no_such_name_fails_the_attachment() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach("whole")

    def load(tensors: Any) -> WholeLoad:
        return {}[next(iter(tensors))[0]]  # type: ignore[no-any-return]

    with engine("tp1 pp2") as e, following(e) as host:
        e.lives[1].load_whole = load  # type: ignore[method-assign]
        outcomes = train(e.store, body, settings=trainer_settings("a"))
        assert "engine rank 1 could not load version 0: KeyError" in str(outcomes[0])
    assert "version 0" in host.error


@pytest.mark.parametrize("say", ["one", "all"])
def test_of_a_whole_version_nothing_leaves_before_it_counts(say: str) -> None:
    """The engine admits accepted versions only: what lay on a lane until then could not be taken back."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach("whole")
        sync.begin(1, train_step=1)
        fill(trainer.layout, trainer.buffers, 9)
        for buffer in list(trainer.buffers)[: 1 if say == "one" else None]:
            sync.final(buffer)
        train_step(sync, trainer, 1)
        sync.wait_committed(1, 10)
        sync.finished("done")

    with engine("tp1 pp2") as e, following(e):
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert all(whole_is(live, 1) for live in e.lives) and e.records(Failed) == []
        assert {record.attempt for record in e.records(Emitted) if record.version == 1} == {1}


class Failing(Pausable):
    """One call raises what vLLM's client makes of an engine's error, or never returns."""

    def __init__(self, agents: list[Any], call: str, *, hangs: bool) -> None:
        super().__init__(agents)
        setattr(self, call, self._hang if hangs else self._raise)

    async def _raise(self, *args: Any, **named: Any) -> None:
        raise Exception("whole update to version 0 failed on rank 1: no room")

    async def _hang(self, *args: Any, **named: Any) -> None:
        await asyncio.sleep(60)


@pytest.mark.parametrize("call", ["pause_generation", "start_weight_update", "update_weights", "resume_generation"])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_call_that_fails_or_hangs_ends_the_updates_with_a_reason(
    call: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_engine, "CALL_GRACE_S", 0.1)
    store = MemoryStore()
    log = MemoryLog(store)
    log.append(EngineReady(engine="e", rank=0, world_size=1, library=""))
    log.append(attach_record(kind="whole"))
    log.append(Accepted(attachment="i1", incarnation=1, version=0, attempt=0, train_step=0))
    sync = EngineSync(log, engine="e", settings=EngineSyncSettings(load_s=0.3))
    words = r"waited 0.4 s for engine e to \w+" if hangs else "failed on rank 1: no room"
    agents = [SimpleNamespace(load_whole=lambda version, deadline_s: None)]
    with pytest.raises(SyncError, match=words):
        asyncio.run(sync.run_whole_updates(Failing(agents, call, hangs=hangs)))
