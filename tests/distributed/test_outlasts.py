"""An engine outlasts bad attachments and a control plane that is away: the next trainer attaches as if nothing was."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

from megastream.engine import agent
from megastream.plan import build_plan
from megastream.protocol import bind
from megastream.protocol.bind import engine_blob, put_layout
from megastream.protocol.records import Detached, EngineReady, Failed
from megastream.sync import SyncError, TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import attach_record
from tests.helpers.spine import ENGINE_SETTINGS, Engine, engine, eventually, train, trainer_settings
from tests.helpers.synthetic import engine_side


def one_step(sync: TrainerSync, trainer: FakeTrainer) -> None:
    version = sync.attach().version + 1
    train_step(sync, trainer, version)
    sync.wait_committed(version, 10)
    sync.finished("done")


def next_trainer_attaches(e: Engine, launch: str = "next") -> None:
    assert train(e.store, one_step, settings=trainer_settings(launch)) == [None] * 4


def in_an_agent() -> bool:
    return threading.current_thread().name.startswith("megastream-engine-rank")


@pytest.mark.parametrize(
    "error", [OverflowError("too large"), KeyError("w"), MemoryError("1 PB"), RecursionError("deep")]
)
def test_whatever_breaks_the_planner_ends_one_attachment(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: Any, **options: Any) -> Any:
        if options["experts_per_unit"] == 3 and in_an_agent():
            raise error
        return build_plan(*args, **options)

    monkeypatch.setattr(bind, "build_plan", build)
    with engine("tp1 pp2") as e:
        outcomes = train(e.store, one_step, settings=replace(trainer_settings("a"), experts_per_unit=3))
        words = f"cannot bind: attachment i1: its layouts and settings break the planner: {type(error).__name__}: "
        assert all(words in str(outcome) for outcome in outcomes), outcomes
        next_trainer_attaches(e)
        assert e.differing(1) == []


def test_whatever_breaks_while_staging_is_made_ends_one_attachment(monkeypatch: pytest.MonkeyPatch) -> None:
    real = agent.make_attachment

    def make(record: Any, *args: Any, **options: Any) -> Any:
        if record.incarnation == 1:
            raise MemoryError("no memory for staging")
        return real(record, *args, **options)

    monkeypatch.setattr(agent, "make_attachment", make)
    with engine("tp1 pp2") as e:
        outcomes = train(e.store, one_step, settings=trainer_settings("a"))
        words = "cannot use a record Attach: MemoryError: no memory for staging"
        assert all(words in str(outcome) for outcome in outcomes), outcomes
        next_trainer_attaches(e)


def test_records_that_make_no_sense_end_their_attachments_only() -> None:
    with engine("tp1 pp2") as e:
        log = MemoryLog(e.store)
        log.append(attach_record(1, piece_bytes=10**30))
        log.append(attach_record(2, trainer_world_size=10**12))
        log.append(attach_record(3))
        eventually(lambda: {record.attachment for record in e.records(Detached)} == {"i1", "i2", "i3"})
        reasons = " ".join(record.reason for record in e.records(Failed))
        assert "piece_bytes must be 1 to" in reasons and "trainer_world_size must be 1 to" in reasons
        assert "layout trainer/3/0 is not on the control plane" in reasons
        for _ in range(3):
            log.next_incarnation()
        next_trainer_attaches(e)
        assert e.differing(1) == []


def test_an_engine_whose_control_plane_was_away_for_long_takes_the_next_trainer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Away beyond every deadline: once between two attachments, once in the middle of one."""

    def left_alone(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        barrier.wait(10)
        e.store.away = True
        with pytest.raises(SyncError, match="the server in memory is away"):
            sync.wait_committed(99, 10)

    def outage() -> None:
        e.store.away = True
        eventually(lambda: lost() == 3)
        e.store.away = False
        eventually(lambda: back() == 3)

    def lost() -> int:
        return caplog.text.count("has lost the control plane")

    def back() -> int:
        return caplog.text.count("has the control plane back")

    barrier = threading.Barrier(4)
    caplog.set_level(logging.WARNING)
    with engine("tp1 pp2", settings=replace(ENGINE_SETTINGS, retry_s=0.1)) as e:
        next_trainer_attaches(e, "a")
        outage()
        next_trainer_attaches(e, "b")
        caplog.clear()
        assert train(e.store, left_alone, version=3, settings=trainer_settings("c")) == [None] * 4
        eventually(lambda: lost() == 3)
        e.store.away = False
        eventually(lambda: len(e.records(Detached)) == 3)
        assert any("had lost the control plane" in record.reason for record in e.records(Failed))
        next_trainer_attaches(e, "d")
        assert lost() == 3 and back() == 3


@pytest.mark.parametrize(
    ("silent_s", "words"), [(35.0, "rank 1 was last seen there 35 s ago"), (None, "rank 1 was not there")]
)
def test_a_trainer_is_told_that_the_engine_is_away(silent_s: float | None, words: str) -> None:
    store = MemoryStore()
    store.silent_s = silent_s
    for rank, layout in enumerate(engine_side("tp1 pp2")):
        put_layout(MemoryLog(store), engine_blob("e", rank, "stream"), layout)
        MemoryLog(store).append(EngineReady(engine="e", rank=rank, world_size=2, library=""))
    outcomes = train(store, one_step, settings=trainer_settings("a", bind_s=1.0))
    told = "engine e is away from the control plane (rank 0 was "
    assert all(told in str(outcome) and words in str(outcome) for outcome in outcomes), outcomes
