"""An engine dies in the middle of training and comes back: real processes, a real redis, SIGKILL."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from megastream.control.embedded import EmbeddedServer
from megastream.protocol.records import Accepted, Attach, Attached, Committed, Failed
from megastream.protocol.step_records import Opened
from megastream.sync import TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.processes import ENGINE, Side, engine_at, trainer_processes


def steps_until_told(sync: TrainerSync, trainer: FakeTrainer, pipe: Connection) -> int:
    """Steps, a little apart, until the pipe names the last one, for which there is always time."""
    version, last = sync.attach().version, None
    while version != last:
        version += 1
        train_step(sync, trainer, version)
        pipe.send(version)
        last = pipe.recv()
    sync.catch_up()
    sync.wait_committed(version, 30)
    sync.finished("done")
    return version


CHANGES = dict(late_joiners=True, lag_s=2.0, alone_s=60.0)


class Ranks:
    """Trainer ranks that take their steps together."""

    def __init__(self, ranks: list[Any]) -> None:
        self._ranks, self.version = ranks, 0

    def step(self, last: bool = False) -> None:
        """Sees that all ranks have taken a step, and lets them take the next one, or end."""
        versions = {rank.answer() for rank in self._ranks}
        assert len(versions) == 1, versions
        self.version = versions.pop()
        for rank in self._ranks:
            rank.pipe.send(self.version if last else None)

    def step_until(self, check: Any, seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, "not reached in time"
            self.step()
            time.sleep(0.05)

    def end(self) -> None:
        self.step(last=True)
        assert [rank.answer(60) for rank in self._ranks] == [("ok", self.version)] * 4


def own(side: Side, kind: type, engine: str) -> list[Any]:
    """Records of an engine's attachments that came late."""
    late = [record.attachment for record in side.records(Attach) if record.engine == engine and record.late_joiner]
    return [record for record in side.records(kind) if record.attachment in late]


def committed(side: Side, attachment: str = "i1") -> list[int]:
    return [record.version for record in side.records(Committed) if record.attachment == attachment]


@pytest.mark.full
def test_training_outlives_its_engine_and_the_next_one_joins(tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path) as server,
        engine_at(server.url, "one", ENGINE) as one,
        trainer_processes(one, "a", steps_until_told, **CHANGES) as processes,
    ):
        ranks = Ranks(processes)
        ranks.step_until(lambda: len(committed(one)) >= 2)
        one.kill()
        ranks.step_until(lambda: any(r.takes == () for r in one.records(Opened)))
        alone = ranks.version
        for _ in range(3):
            ranks.step()
        with engine_at(server.url, "two", "tp1 pp2") as two:
            ranks.step_until(lambda: len(own(two, Committed, "two")) >= 3)
            ranks.end()
            assert two.differing(ranks.version) == []
            attached, accepted = own(two, Attached, "two"), own(two, Accepted, "two")
            assert own(two, Committed, "two")[-1].version == ranks.version
    assert len(attached) == 1 and attached[0].version > alone and attached[0].replaced
    assert accepted[0].version == attached[0].version and accepted[0].attempt == 1
    assert accepted[0].train_step == accepted[0].version, "the step that made these weights"
    assert [record.version for record in accepted] == sorted({record.version for record in accepted})


@pytest.mark.full
def test_an_engine_whose_lanes_break_joins_again_under_a_new_attachment(tmp_path: Path) -> None:
    """Only what was between them is lost: the engine serves on, says that it is free, and is asked again."""
    with (
        EmbeddedServer(tmp_path) as server,
        engine_at(server.url, "one", ENGINE) as one,
        trainer_processes(one, "a", steps_until_told, **CHANGES) as processes,
    ):
        ranks = Ranks(processes)
        ranks.step_until(lambda: len(committed(one)) >= 2)
        one.log.append(Failed(attachment="i1", side="engine", rank=1, reason="a switch was exchanged"))
        ranks.step_until(lambda: len(committed(one, "i1-2")) >= 2)
        ranks.end()
        assert one.differing(ranks.version) == []
        before, after = committed(one), committed(one, "i1-2")
        assert after == sorted(after) and after[0] > before[-1]
        assert [record.engine for record in one.records(Attach)] == ["one", "one"]
