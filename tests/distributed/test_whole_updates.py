"""Gate `pause`: the host pauses, every rank loads the whole version over the lanes, the host resumes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from megastream.sync import EngineSync, SyncError, TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.memory_log import MemoryLog
from tests.helpers.spine import engine, eventually, train, trainer_settings
from tests.helpers.synthetic import full_tensor


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


def test_whole_updates_pause_load_and_resume() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach("whole")
        for version in (1, 2):
            train_step(sync, trainer, version)
            sync.wait_committed(version, 10)
            for live in e.lives:
                assert live.whole and all(
                    full_tensor(name, version).equal(tensor) for name, tensor in live.whole.items()
                )
        sync.finished("done")

    with engine("tp2 ep2") as e:
        llm = Pausable(e.agents)
        updates: list[Any] = []
        host = threading.Thread(
            target=lambda: updates.extend(
                asyncio.run(EngineSync(MemoryLog(e.store), engine="e").run_whole_updates(llm))
            )
        )
        host.start()
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        host.join(10)
        assert [update.version for update in updates] == [0, 1, 2]
        assert all(update.stall_s > 0 and update.repair_s == 0.002 for update in updates)
        assert llm.calls[-4:] == [("pause", "keep", False), ("start",), ("finish",), ("resume",)]


def test_a_whole_update_that_breaks_off_is_not_resumed() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach("whole")
        sync.begin(1, 1)
        sync.accept()
        eventually(lambda: llm.calls.count(("start",)) == 2)
        if sync.rank == 3:
            raise ZeroDivisionError("injected")
        sync.wait_committed(1, 10)

    with engine("tp1 pp2") as e:
        llm = Pausable(e.agents)
        failure: list[str] = []

        def run() -> None:
            try:
                asyncio.run(EngineSync(MemoryLog(e.store), engine="e").run_whole_updates(llm))
            except (SyncError, RuntimeError) as error:
                failure.append(str(error))

        host = threading.Thread(target=run)
        host.start()
        outcomes = train(e.store, body, settings=trainer_settings("a"))
        host.join(10)
        assert failure and "trainer rank 3" in str(outcomes[0])
        assert llm.calls[-1] == ("start",), "not resumed"
