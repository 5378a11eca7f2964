"""Every wait has a deadline: it ends there, neither sooner nor much later, and says who waited for what, how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megastream.engine.settings import EngineSettings
from megastream.protocol.bind import engine_blob, put_layout
from megastream.protocol.part_records import Mixed
from megastream.protocol.records import Detached, EngineReady, Failed, TrainingFinished
from megastream.protocol.step_records import Opened
from megastream.sync import SyncError, TrainerSync
from tests.helpers.coordinator_bench import STAGES, Bench, bench
from tests.helpers.fake_trainer import FakeTrainer
from tests.helpers.limits import FAR_S, ends_at
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import attach_record
from tests.helpers.spine import eventually, trainer_settings
from tests.helpers.synthetic import engine_side, trainer_side
from tests.unit.test_usher import bench as ushering

LIMIT_S = 0.4
FAR = dict(bind_s=FAR_S, liveness_s=FAR_S, commit_s=FAR_S, manifest_s=FAR_S, detach_s=FAR_S)


def lone_trainer(store: MemoryStore, rank: int, world_size: int, limit: str) -> TrainerSync:
    far = dict.fromkeys(("ready_s", "bind_s", "transfer_s", "attach_s", "detach_s"), FAR_S)
    settings = trainer_settings("t", **{**far, limit: LIMIT_S})
    trainer = FakeTrainer(trainer_side("tp1")[0])
    return TrainerSync(MemoryLog(store), rank=rank, world_size=world_size, trainer=trainer, settings=settings)


def nobody(store: MemoryStore) -> None:
    """No engine at all."""


def engine_that_is_silent(store: MemoryStore) -> None:
    """It is up, and takes no Attach."""
    log = MemoryLog(store)
    for layout in engine_side("tp1 pp2"):
        put_layout(log, engine_blob("e", layout.rank, "stream"), layout)
        log.append(EngineReady(engine="e", rank=layout.rank, world_size=2, library=""))


@pytest.mark.parametrize(
    ("rank", "world_size", "limit", "others", "words"),
    [
        (1, 2, "ready_s", nobody, "trainer rank 1 waited 0.4 s for trainer rank 0 of launch t to come up"),
        (0, 2, "ready_s", nobody, "trainer rank 0 waited 0.4 s for trainer rank 1 to come up"),
        (0, 1, "ready_s", nobody, "trainer rank 0 waited 0.4 s for all ranks of an engine to come up"),
        (
            0,
            1,
            "bind_s",
            engine_that_is_silent,
            "trainer rank 0 waited 0.4 s for engine rank 0, engine rank 1 to build",
        ),
    ],
    ids=["rank 0", "a rank", "an engine", "plans"],
)
def test_a_trainer_waits_for_what_it_attaches_to(
    rank: int, world_size: int, limit: str, others: Callable[[MemoryStore], None], words: str
) -> None:
    store = MemoryStore()
    others(store)
    sync = lone_trainer(store, rank, world_size, limit)
    try:
        with ends_at(LIMIT_S), pytest.raises(SyncError, match=words):
            sync.attach()
    finally:
        sync.close()


def never_opens(b: Bench) -> None:
    b.post(attach_record())


def goes_silent(b: Bench) -> None:
    b.attach()
    b.live()


def is_not_answered(b: Bench) -> None:
    goes_silent(b)
    b.version(1)


def is_left_open(b: Bench) -> None:
    goes_silent(b)
    b.accept(1)
    b.part(1, STAGES["s0"])
    eventually(lambda: len(b.core.asked) == 1)
    b.core.answer()


def ends_before_its_last_version(b: Bench) -> None:
    goes_silent(b)
    b.post(TrainingFinished(attachment="i1", incarnation=1, version=3, reason="done"))


ENGINE: dict[str, tuple[Callable[[Bench], None], type, str]] = {
    "bind_s": (never_opens, Failed, "the engine waited 0.4 s for the trainer to open its lanes"),
    "liveness_s": (goes_silent, Failed, "the engine heard nothing from the trainer for 0.4 s"),
    "commit_s": (is_not_answered, Failed, "a commit was enqueued 0.4 s ago and the engine's ranks have not replied"),
    "manifest_s": (is_left_open, Mixed, "part of version 1 is live, and 0.4 s later it is not complete"),
    "detach_s": (ends_before_its_last_version, Detached, ""),
}
"""Setting -> what leads to the wait, and the record that ends it."""


@pytest.mark.parametrize("setting", ENGINE)
def test_an_engine_waits_for_its_trainer_and_for_its_ranks(setting: str) -> None:
    lead, kind, words = ENGINE[setting]
    settings: dict[str, Any] = {**FAR, setting: LIMIT_S, "poll_s": 0.02}
    gate = "stage" if setting == "manifest_s" else "version"
    with bench(EngineSettings(**settings), gate) as b:
        lead(b)
        with ends_at(LIMIT_S, early_s=LIMIT_S):
            eventually(lambda: bool(b.records(kind)), FAR_S)
        assert words in getattr(b.records(kind)[0], "reason", "")


def test_a_step_waits_for_slow_engines_and_training_for_any() -> None:
    with ushering(lag_s=LIMIT_S) as b:
        b.attached("i1", "a")
        b.usher.note_sent("i1", 1, 0)
        b.usher.open_after(1, 1)
        with ends_at(LIMIT_S):
            b.waits(2)
            eventually(lambda: b.of(Opened) != [], FAR_S)
    with ushering(late_joiners=True, alone_s=LIMIT_S) as b, ends_at(LIMIT_S):
        b.usher.open_after(7, 7)
        eventually(lambda: b.failed != [], FAR_S)
