"""4 trainer processes, 2 engine processes, gloo lanes, a real redis; ranks are killed where it hurts."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megastream.control.embedded import EmbeddedServer
from megastream.protocol.records import Committed, Detached, Failed
from megastream.sync import TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.processes import Side, engine_processes, trainer_processes, wait_until

PROMPT_S = 12.0
"""A killed process is noticed by everybody within this time, far below any deadline of the settings."""


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


def settled(side: Side) -> list[tuple[int, int]]:
    """Open files and threads of each engine rank, once what has ended is gone."""
    before: list[tuple[int, int]] = []
    while (now := [rank.ask("held") for rank in side.ranks]) != before:
        before = now
        time.sleep(0.5)
    return now


@pytest.mark.full
def test_trainers_that_are_killed_again_and_again_leave_nothing_in_the_engine(tmp_path: Path) -> None:
    """Each of them in the middle of a version; the next one attaches, and open files and threads do not grow."""
    with engine_processes(EmbeddedServer(tmp_path)) as side:
        held = []
        for cycle in range(5):
            with trainer_processes(side, f"killed-{cycle}", stops_in_mid_version) as ranks:
                assert ranks[1].answer() == "in mid version"
                ranks[1].kill()
                answers = [rank.answer() for rank in ranks if rank is not ranks[1]]
                assert {kind for kind, _ in answers} == {"error"}, answers
            wait_until(lambda cycle=cycle: len(side.records(Detached)) == cycle + 1, 10)  # type: ignore[misc]
            held.append(settled(side))
        for first, last in zip(held[0], held[-1], strict=True):
            assert all(now <= then for now, then in zip(last, first, strict=True)), held
        with trainer_processes(side, "last", three_versions) as ranks:
            bases = {rank.answer() for rank in ranks}
        assert [kind for kind, _ in bases] == ["ok"]
        assert side.differing(side.core.live_version()) == []
