"""Waits that need lanes, held against the limits that they promise: the engine stands still, or does not answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megastream.sync import SyncError, TrainerSync
from megastream.transport.gloo_lane import GlooReceiveLane
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.limits import FAR_S, ends_at
from tests.helpers.memory_log import MemoryStore
from tests.helpers.spine import engine, train, trainer_settings

pytestmark = pytest.mark.full

LIMIT_S = 2.0
FAR = dict(attach_s=FAR_S, transfer_s=FAR_S, detach_s=FAR_S)


def fails(store: MemoryStore, limit: str, body: Any, words: str) -> None:
    outcomes = train(store, body, settings=trainer_settings("t", **{**FAR, limit: LIMIT_S}))
    assert all(isinstance(outcome, SyncError) and words in str(outcome) for outcome in outcomes), outcomes


def test_an_engine_that_does_not_take_the_base_version() -> None:
    """Its core stands still before it compares."""
    with engine("tp1 pp2") as e:
        e.core.hold.clear()
        try:
            with ends_at(LIMIT_S):
                words = "waited 2 s for engine e to compare and take base version 0"
                fails(e.store, "attach_s", lambda sync, trainer: sync.attach(), words)
        finally:
            e.core.hold.set()


def test_an_engine_that_does_not_answer_the_end_of_training() -> None:
    """Its core reads no record any more."""
    with engine("tp1 pp2") as e:
        together = threading.Barrier(4, action=e.coordinator._follower.stop)

        def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
            sync.attach()
            together.wait(30)
            sync.finished("done")

        with ends_at(LIMIT_S):
            fails(e.store, "detach_s", body, "waited 2 s for engine e to answer the end of training")


def test_an_engine_that_acknowledges_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lanes take bytes and say nothing; the step behind that version cannot begin."""
    honest, stands, go_on = GlooReceiveLane.finish_payload, threading.Event(), threading.Event()

    def standing(self: GlooReceiveLane, *args: Any) -> None:
        if stands.is_set():
            go_on.wait(FAR_S)
        honest(self, *args)

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        together.wait(30)
        stands.set()
        train_step(sync, trainer, 1)
        train_step(sync, trainer, 2)

    together = threading.Barrier(4)
    monkeypatch.setattr(GlooReceiveLane, "finish_payload", standing)
    with engine("tp1 pp2") as e:
        try:
            with ends_at(LIMIT_S):
                fails(e.store, "transfer_s", body, f"{LIMIT_S} s")
        finally:
            go_on.set()
