"""Trainer and engine sides together over real gloo lanes: 4 trainer ranks, 2 engine ranks, no Megatron, no vLLM."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from megastream.engine import stream
from megastream.protocol.records import (
    Attached,
    Committed,
    Detached,
    Failed,
    Poisoned,
    Sealed,
    TrainingFinished,
    WeightsReady,
)
from megastream.sync import SyncError, TrainerSync, binding
from megastream.transport.gloo_lane import GlooReceiveLane
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.memory_log import MemoryStore
from tests.helpers.spine import ENGINE_SETTINGS, engine, eventually, train, trainer_settings


@pytest.mark.parametrize("mesh", ["tp1 pp2", "tp2 ep2"])
def test_versions_arrive_bit_for_bit_and_a_new_incarnation_goes_on(mesh: str) -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        attached = sync.attach()
        assert attached.version == sync.next_version - 1
        for version in range(attached.version + 1, attached.version + 4):
            train_step(sync, trainer, version)
            sync.wait_committed(version, 10)
        sync.finished("done")

    with engine(mesh) as e:
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert e.differing(3) == []
        assert [record.version for record in e.records(Committed)] == [1, 2, 3]
        # a later start, with other weights, numbers above what was published
        assert train(e.store, body, version=50, settings=trainer_settings("b")) == [None] * 4
        assert [record.version for record in e.records(Committed)] == [1, 2, 3, 4, 5, 6, 7]
        assert e.differing(7) == []
        assert len(e.records(Detached)) == 2
        assert e.records(Failed) == []


def steps(*versions: int, finish: bool = True) -> Any:
    """A training loop that waits for every version to be live."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        for version in versions:
            train_step(sync, trainer, version)
            sync.wait_committed(version, 10)
        if finish:
            sync.finished("done")

    return body


def test_a_slow_engine_holds_the_trainer_up_and_takes_the_newest() -> None:
    """The core stands still in the commit of version 1. Versions 2 and 3 become ready, 4 finds no staging; then the
    core goes on: 3 is the newest, 2 is never live."""

    def ready(version: int) -> bool:
        sealed = [record for record in e.records(Sealed) if record.version == version]
        return len(sealed) == 2 and version in [record.version for record in e.records(WeightsReady)]

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        if sync.rank == 0:
            e.core.hold.clear()
        barrier.wait(10)
        for version in (1, 2, 3):
            train_step(sync, trainer, version)
            eventually(lambda version=version: ready(version))  # type: ignore[misc]
        if sync.rank == 0:
            threading.Timer(0.5, lambda: (held.append((sync.live_version, ready(4))), e.core.hold.set())).start()
        train_step(sync, trainer, 4)
        sync.finished("done")

    barrier, held = threading.Barrier(4), []
    with engine("tp1 pp2", settings=replace(ENGINE_SETTINGS, staging_sets=3)) as e:
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert held == [(0, False)]
        assert [record.version for record in e.records(Committed)] == [1, 3, 4]
        assert e.differing(4) == []


def test_other_weights_are_refused_before_training() -> None:
    """The trainer starts from another checkpoint than the engine serves: named, and the engine serves on."""
    with engine("tp1 pp2") as e:
        outcomes = train(e.store, steps(1), version=9, settings=trainer_settings("a"))
        for outcome in outcomes:
            assert isinstance(outcome, SyncError)
            assert "version 0 is not what engine e serves" in str(outcome) and "tensors differ" in str(outcome)
        assert e.differing(0) == [] and e.core.commits == []
        assert train(e.store, steps(2), settings=trainer_settings("b")) == [None] * 4, "the right weights, later"
        assert e.differing(2) == []


def test_one_flipped_bit_in_a_live_weight_is_found_at_attach() -> None:
    with engine("tp2 ep2") as e:
        name = next(iter(e.lives[1].buffers))
        e.lives[1].buffers[name].view(dtype=torch.int16)[3] ^= 1
        outcome = train(e.store, steps(1), settings=trainer_settings("a"))[0]
        assert f"1 of {len(e.lives[1].buffers)} tensors differ on engine rank 1, first {name}" in str(outcome)


def test_a_transport_that_says_yes_and_writes_nothing_is_found_at_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = GlooReceiveLane.begin_payload

    def lying(self: GlooReceiveLane, header: Any, into: torch.Tensor, deadline_s: float) -> None:
        honest(self, header, torch.empty_like(into), deadline_s)

    monkeypatch.setattr(GlooReceiveLane, "begin_payload", lying)
    with engine("tp1 pp2") as e:
        assert "tensors differ on engine rank" in str(train(e.store, steps(1), settings=trainer_settings("a"))[0])
        assert e.core.commits == []


def test_staging_that_leaves_elements_out_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sealed is counted as it is written, so a piece that is written in part contradicts the manifest."""
    honest = stream.scatter

    def partial(piece: Any, payload: torch.Tensor, regions: list[torch.Tensor]) -> int:
        return honest(piece, payload, regions[:-1] if piece.seq == 3 else regions)

    monkeypatch.setattr(stream, "scatter", partial)
    with engine("tp1 pp2") as e:
        outcomes = train(e.store, steps(1), settings=trainer_settings("a"))
        assert re.search(r"version 0: \d+ elements sealed, its manifest says \d+", str(outcomes[0])), outcomes
        assert e.records(Attached) == [] and e.core.commits == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checksum": 1}, "checksum"),
        ({"plan_digest": "other"}, "plan_digest is 'other'"),
        ({"seq": 0}, "refused piece 0 .* unit is .* planned"),
    ],
)
def test_a_bad_piece_ends_the_version_on_all_ranks_and_the_next_attachment_works(
    changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = binding.header_maker

    def bad(*terms: Any) -> Any:
        make = good(*terms)

        def make_header(piece: Any, version: int, attempt: int, checksum: int) -> Any:
            header = make(piece, version, attempt, checksum)
            return msgspec.structs.replace(header, **changes) if version == 2 and piece.seq == spoiled else header

        return make_header

    spoiled = 25
    monkeypatch.setattr(binding, "header_maker", bad)
    with engine("tp1 pp2") as e:
        begin = time.monotonic()
        outcomes = train(e.store, steps(1, 2), settings=trainer_settings("a"))
        assert time.monotonic() - begin < 8
        assert all(isinstance(outcome, SyncError) for outcome in outcomes), outcomes
        assert re.search(words, e.records(Failed)[0].reason), e.records(Failed)
        assert e.differing(1) == [], "the version before keeps serving, whole"
        monkeypatch.setattr(binding, "header_maker", good)
        assert train(e.store, steps(3, 4), version=1, settings=trainer_settings("b")) == [None] * 4
        assert e.differing(4) == []


def test_a_trainer_rank_that_raises_in_mid_version_ends_all_ranks() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        sync.begin(1, 1)
        for index, buffer in enumerate(trainer.buffers):
            if sync.rank == 2 and index == 1:
                raise ZeroDivisionError("injected")
            sync.final(buffer)
        sync.accept()
        sync.finish()
        sync.finished("done")

    with engine("tp2 ep2") as e:
        outcomes = train(e.store, body, settings=trainer_settings("a"))
        assert [type(outcome) for outcome in outcomes] == [SyncError, SyncError, ZeroDivisionError, SyncError]
        assert "trainer rank 2 failed: left before training was finished" in str(outcomes[0])
        eventually(lambda: len(e.records(Detached)) == 1)
        assert e.differing(0) == [] and e.records(Committed) == []
        assert train(e.store, steps(2), settings=trainer_settings("b")) == [None] * 4
        assert e.differing(2) == []


@pytest.mark.parametrize("failures", [1, 2])
def test_a_commit_is_repeated_once_and_then_poisons_until_the_next_version(failures: int) -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        if sync.rank == 0:
            e.lives[1].break_commits = failures
        train_step(sync, trainer, 1)
        if failures == 1:
            sync.wait_committed(1, 10)
        else:
            with pytest.raises(SyncError, match="poisoned.*rank 1.*injected: the copy failed"):
                sync.wait_committed(1, 10)
        train_step(sync, trainer, 2)
        sync.wait_committed(2, 10)
        sync.finished("done")

    with engine("tp1 pp2") as e:
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert len(e.core.poisons) == len(e.records(Poisoned)) == failures - 1
        assert [record.version for record in e.records(Committed)] == [1, 2][failures - 1 :]
        assert e.differing(2) == []


def test_a_new_start_supersedes_a_hanging_one() -> None:
    def hang(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        with pytest.raises(SyncError, match="superseded by incarnation 2"):
            sync.wait_committed(1, 10)

    with engine("tp1 pp2") as e:
        first = threading.Thread(target=lambda: outcomes.extend(train(e.store, hang, settings=trainer_settings("a"))))
        outcomes: list[Any] = []
        first.start()
        eventually(lambda: len(e.records(Attached)) == 1)
        assert train(e.store, steps(2), settings=trainer_settings("b")) == [None] * 4
        first.join(10)
        assert outcomes == [None] * 4
        assert e.differing(2) == []


def test_a_trainer_that_says_nothing_is_ended_at_the_deadline() -> None:
    def silent(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        with pytest.raises(SyncError, match="heard nothing from the trainer for 0.5 s|no header came within 0.5 s"):
            sync.wait_committed(1, 10)

    with engine("tp1 pp2", settings=replace(ENGINE_SETTINGS, liveness_s=0.5)) as e:
        assert train(e.store, silent, settings=trainer_settings("a")) == [None] * 4
        assert e.differing(0) == []


def test_without_the_control_plane_the_engine_serves_on_and_the_trainer_says_why() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        train_step(sync, trainer, 1)
        sync.wait_committed(1, 10)
        barrier.wait(10)
        e.store.away = True
        sync.wait_committed(2, 10)

    barrier = threading.Barrier(4)
    with engine("tp1 pp2") as e:
        outcomes = train(e.store, body, settings=trainer_settings("a"))
        assert all("the server in memory is away" in str(outcome) for outcome in outcomes), outcomes
        assert e.differing(1) == [] and e.core.live_version() == 1


def test_nobody_there_ends_with_who_waits_for_whom() -> None:
    outcomes = train(MemoryStore(), steps(1), settings=trainer_settings("a", ready_s=0.5))
    assert "trainer rank 0 waited 0.5 s for all ranks of an engine to come up" in str(outcomes[0])
    first = str(outcomes[0])
    assert [str(outcome) for outcome in outcomes[1:]] == [f"trainer rank 0 failed: {first}"] * 3


def test_the_end_of_training_waits_for_the_last_version() -> None:
    """Only TrainingFinished ends an attachment, and it is answered once the version it names is live."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        if sync.rank == 0:
            e.core.hold.clear()
        train_step(sync, trainer, 1)
        if sync.rank == 0:
            threading.Timer(0.5, e.core.hold.set).start()
        sync.finished("done")

    with engine("tp1 pp2") as e:
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        order = [type(r) for r in e.store.records if isinstance(r, TrainingFinished | Committed | Detached)]
        assert order == [TrainingFinished, Committed, Detached]
