"""4 trainer processes, 2 engine processes, gloo lanes, a real redis; ranks are killed where it hurts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megastream.control.embedded import EmbeddedServer
from megastream.control.redis_log import RedisLog
from megastream.engine.coordinator import Coordinator
from megastream.engine.settings import EngineSettings
from megastream.protocol.records import Committed, Detached, Failed
from megastream.sync import TrainerSettings, TrainerSync
from tests.helpers.fake_engine import FakeCore
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.processes import RUN, Process, RemoteRank, run_trainer_rank, wait_until

TRAINER, ENGINE = "tp1 pp2(2,1) ep2", "tp2 ep2"
SETTINGS = EngineSettings(bind_s=20, transfer_s=10, liveness_s=60, commit_s=20, detach_s=20, poll_s=0.05)
PROMPT_S = 12.0
"""A killed process is noticed by everybody within this time, far below any deadline of the settings."""


@dataclass
class Side:
    url: str
    ranks: list[RemoteRank]
    core: FakeCore
    log: RedisLog

    def records(self, kind: type) -> list[Any]:
        return [record for _, record in self.log.read("0", 0.01) if isinstance(record, kind)]

    def differing(self, version: int) -> list[str]:
        return [name for rank in self.ranks for name in rank.ask("differing", version)]


@contextmanager
def engine_processes(server: EmbeddedServer) -> Iterator[Side]:
    with ExitStack() as stack:
        stack.enter_context(server)
        ranks = [RemoteRank(server.url, ENGINE, rank, SETTINGS) for rank in range(2)]
        for rank in ranks:
            stack.callback(rank.end)
        core = FakeCore(ranks)
        stack.callback(core.close)
        log = RedisLog(server.url, RUN, reconnect_s=10)
        stack.callback(log.close)
        coordinator = Coordinator(log, engine="e", world_size=2, core=core, settings=SETTINGS)
        coordinator.start()
        stack.callback(coordinator.close)
        yield Side(server.url, ranks, core, log)


@contextmanager
def trainer_processes(side: Side, launch: str, body: Any, content: int = 0) -> Iterator[list[Process]]:
    times = dict(ready_s=30.0, bind_s=30.0, transfer_s=30.0, attach_s=30.0, detach_s=30.0)
    settings = TrainerSettings(launch=launch, piece_bytes=4096, experts_per_unit=2, **times)
    ranks = [Process(run_trainer_rank, side.url, TRAINER, rank, body, content, settings) for rank in range(4)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def three_versions(sync: TrainerSync, trainer: FakeTrainer, pipe: Connection) -> int:
    base = sync.attach().version
    for version in range(base + 1, base + 4):
        train_step(sync, trainer, version)
        sync.wait_committed(version, 30)
    sync.finished("done")
    return base


def stops_in_mid_version(sync: TrainerSync, trainer: FakeTrainer, pipe: Connection) -> None:
    version = sync.attach().version + 1
    train_step(sync, trainer, version)
    sync.wait_committed(version, 30)
    sync.wait_leases()
    sync.begin(version + 1, 0)
    for index, buffer in enumerate(trainer.buffers):
        if sync.rank == 1 and index == 2:
            pipe.send("in mid version")
            time.sleep(60)
        sync.final(buffer)
    sync.accept()
    sync.finish()
    sync.wait_committed(version + 1, 60)


def trains_for_ever(sync: TrainerSync, trainer: FakeTrainer, pipe: Connection) -> None:
    version = sync.attach().version
    pipe.send("attached")
    while True:
        version += 1
        train_step(sync, trainer, version)
        time.sleep(0.1)


def test_versions_incarnations_and_killed_ranks(tmp_path: Path) -> None:
    with engine_processes(EmbeddedServer(tmp_path)) as side:
        with trainer_processes(side, "first", three_versions) as ranks:
            assert [rank.answer() for rank in ranks] == [("ok", 0)] * 4
        assert side.differing(3) == []
        assert [record.version for record in side.records(Committed)] == [1, 2, 3]

        with trainer_processes(side, "killed", stops_in_mid_version, content=3) as ranks:
            assert ranks[1].answer() == "in mid version"
            begin = time.monotonic()
            ranks[1].kill()
            answers = [rank.answer() for rank in ranks if rank is not ranks[1]]
            assert time.monotonic() - begin < PROMPT_S
            assert {kind for kind, _ in answers} == {"error"} and all("SyncError" in why for _, why in answers), answers
        wait_until(lambda: len(side.records(Detached)) == 2, 10)
        assert "trainer 1" in side.records(Failed)[0].reason or "rank 1" in side.records(Failed)[0].reason
        assert side.differing(5) == [] and side.core.live_version() == 5, "version 6 was never complete"

        with trainer_processes(side, "next", three_versions, content=7) as ranks:
            assert [rank.answer() for rank in ranks] == [("ok", 6)] * 4
        assert side.differing(9) == []

        with trainer_processes(side, "engine killed", trains_for_ever, content=10) as ranks:
            assert [rank.answer() for rank in ranks] == ["attached"] * 4
            begin = time.monotonic()
            side.ranks[1].kill()
            answers = [rank.answer() for rank in ranks]
            assert time.monotonic() - begin < PROMPT_S, answers
            assert {kind for kind, _ in answers} == {"error"}, answers
