"""Redis comes back empty: in the middle of training, which goes on, and between two trainers: the next one attaches."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

import redis

from megastream.control.embedded import EmbeddedServer
from megastream.protocol.records import Detached, Failed
from megastream.sync import TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.processes import engine_processes, trainer_processes


def trains_across_a_restart(sync: TrainerSync, trainer: FakeTrainer, pipe: Connection) -> None:
    sync.attach()
    for version in (1, 2, 3):
        train_step(sync, trainer, version)
        sync.wait_committed(version, 30)
        if version == 1:
            pipe.send("live")
            pipe.recv()
    sync.finished("done")


def test_training_goes_on_after_redis_lost_everything(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    with engine_processes(server) as side, trainer_processes(side, "a", trains_across_a_restart) as ranks:
        assert [rank.answer() for rank in ranks] == ["live"] * 4
        server.stop()
        time.sleep(1)
        assert side.core.live_version() == 1
        server.start()
        for rank in ranks:
            rank.pipe.send("go on")
        assert [rank.answer() for rank in ranks] == [("ok", None)] * 4
        assert side.differing(3) == [] and side.records(Failed) == []
        assert len(side.records(Detached)) == 1


def one_step(sync: TrainerSync, trainer: FakeTrainer, pipe: Connection) -> int:
    version = sync.attach().version + 1
    train_step(sync, trainer, version)
    sync.wait_committed(version, 30)
    sync.finished("done")
    return version


def test_an_engine_is_attachable_again_after_redis_lost_everything_between_trainers(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    with engine_processes(server) as side:
        with trainer_processes(side, "a", one_step) as ranks:
            assert [rank.answer() for rank in ranks] == [("ok", 1)] * 4
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        with trainer_processes(side, "b", one_step, content=1) as ranks:
            assert [rank.answer(60) for rank in ranks] == [("ok", 3)] * 4
        assert side.differing(3) == [] and side.records(Failed) == []
