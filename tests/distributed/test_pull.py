"""Engines that stage nothing, or a part: the rest is pulled inside the commit, over real gloo lanes."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from megastream.control.embedded import EmbeddedServer
from megastream.engine.commits import Commits
from megastream.plan import build_plan
from megastream.plan.tiers import StagingBudget
from megastream.protocol.part_records import Pull
from megastream.protocol.records import Bound, Committed, Compared, Emitted, Failed, Poisoned, WeightsReady
from megastream.sync import EnginePoisoned, SyncError, TrainerSync
from megastream.trainer.outgoing import EmitError
from megastream.trainer.pulled import PullEmitter
from tests.helpers import processes
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.spine import ENGINE_SETTINGS, TRAINER, Engine, engine, eventually, train, trainer_settings
from tests.helpers.synthetic import FAMILY, engine_side, fill, trainer_side

NOTHING, DENSE = StagingBudget(0, 0), StagingBudget(60_000, 0)
"""Of two sets: nothing at all; what is dense, on the device."""
WAIT_S, PROMPT_S = 10.0, 9.0


def pulling(budget: StagingBudget, **times: float) -> Any:
    return replace(ENGINE_SETTINGS, staging=budget, **times)


def versions(*numbers: int, waits: bool = True) -> Any:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        attached = sync.attach()
        for number in numbers or range(attached.version + 1, attached.version + 4):
            train_step(sync, trainer, number)
            if waits:
                sync.wait_committed(number, WAIT_S)
        sync.finished("done")

    return body


def plan_tensors(mesh: str) -> dict[int, int]:
    options = dict(kind="stream", piece_bytes=4096, experts_per_unit=2, finality="pipelined")
    return build_plan(trainer_side(TRAINER), engine_side(mesh), FAMILY, **options).tensors


def pulled_units(e: Engine) -> dict[int, int]:
    return {record.rank: len(record.pulled) for record in e.records(Bound) if record.side == "engine"}


@pytest.mark.parametrize(
    ("mesh", "budget"),
    [
        ("tp1 pp2", NOTHING),
        pytest.param("tp2 ep2", NOTHING, marks=pytest.mark.full),
        pytest.param("tp1 pp2", DENSE, marks=pytest.mark.full),
        pytest.param("tp2 ep2", DENSE, marks=pytest.mark.full),
    ],
)
def test_what_is_pulled_is_live_bit_for_bit_and_a_new_incarnation_goes_on(mesh: str, budget: StagingBudget) -> None:
    with engine(mesh, settings=pulling(budget)) as e:
        wrong = e.watch()
        assert train(e.store, versions(), settings=trainer_settings("a")) == [None] * 4
        assert train(e.store, versions(waits=False), version=4, settings=trainer_settings("b")) == [None] * 4
        assert e.records(Failed) == [] and e.core.poisons == []
        committed = [record.version for record in e.records(Committed)]
        assert committed == [1, 2, 3, 4, 5, 6, 7], "the first base was compared, the second one written"
        assert wrong == [] and e.differing(7) == []
        assert [record.version for record in e.records(Pull)] == [0, *committed]
        first = {record.rank: record.tensors for record in e.records(Compared)[:2]}
        assert first == {rank: plan_tensors(mesh)[rank] for rank in first}, "whatever is staged"
        assert all(pulled_units(e).values())
        manifest, emitted = e.records(WeightsReady)[-1], e.records(Emitted)
        assert (manifest.elements == 0) == (budget == NOTHING) == (sum(record.pieces for record in emitted) == 0)


@pytest.mark.full
@pytest.mark.parametrize("budget", [NOTHING, DENSE])
def test_another_checkpoint_is_refused_and_nothing_of_it_is_written(budget: StagingBudget) -> None:
    with engine("tp2 ep2", settings=pulling(budget)) as e:
        name = next(name for name in e.lives[1].buffers if "w13" in name)
        e.lives[1].buffers[name].view(dtype=torch.int16)[3] ^= 1
        outcome = train(e.store, versions(1), settings=trainer_settings("a"))[0]
        assert f"1 of {len(e.lives[1].buffers)} tensors differ on engine rank 1, first {name}" in str(outcome)
        assert e.core.commits == [] and e.core.poisons == []


@pytest.mark.full
def test_an_attempt_that_does_not_count_is_never_pulled() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        sync.begin(1, train_step=1)
        fill(trainer.layout, trainer.buffers, 9)
        for buffer in trainer.buffers:
            sync.final(buffer)
        train_step(sync, trainer, 1)
        sync.wait_committed(1, WAIT_S)
        train_step(sync, trainer, 2)
        sync.finished("done")

    with engine("tp1 pp2", settings=pulling(DENSE)) as e:
        wrong = e.watch()
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert wrong == [] and [(record.version, record.attempt) for record in e.records(Pull)] == [
            (0, 0),
            (1, 1),
            (2, 0),
        ]


@pytest.mark.full
def test_a_step_waits_for_the_commit_and_leaves_no_version_out() -> None:
    """The core stands still for a while: weights that it has to pull stay as they are."""
    begun: list[float] = []

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        if sync.rank == 0:
            e.core.hold.clear()
        barrier.wait(10)
        train_step(sync, trainer, 1)
        if sync.rank == 0:
            threading.Timer(1.0, e.core.hold.set).start()
        start = time.monotonic()
        train_step(sync, trainer, 2)
        begun.append(time.monotonic() - start)
        train_step(sync, trainer, 3)
        sync.finished("done")

    barrier = threading.Barrier(4)
    with engine("tp1 pp2", settings=pulling(NOTHING)) as e:
        wrong = e.watch()
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert wrong == [] and [record.version for record in e.records(Committed)] == [1, 2, 3]
        assert min(begun) > 0.5


def test_a_sender_that_is_lost_inside_a_pull_poisons_the_engine_and_the_next_trainer_heals_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = PullEmitter.let_go

    def lost(self: PullEmitter) -> None:
        if self._version == 2 and self._rank == 1:
            raise EmitError("injected: it is lost")
        honest(self)

    with engine("tp1 pp2", settings=pulling(NOTHING, commit_s=20)) as e:
        with monkeypatch.context() as patch:
            patch.setattr(PullEmitter, "let_go", lost)
            begin = time.monotonic()
            outcomes = train(e.store, versions(1, 2, 3), settings=trainer_settings("a"))
        assert all(isinstance(outcome, SyncError) for outcome in outcomes), outcomes
        eventually(lambda: bool(e.core.poisons))
        assert time.monotonic() - begin < 9, "nobody waits until the pull's own deadline"
        eventually(lambda: [record.version for record in e.records(Poisoned)] == [2])
        assert "pieces were pulled, then " in e.records(Poisoned)[0].reason
        assert train(e.store, versions(), version=5, settings=trainer_settings("b")) == [None] * 4
        assert e.differing(e.records(Committed)[-1].version) == []


@pytest.mark.full
def test_a_rank_that_cannot_write_poisons_the_version_and_the_trainer_goes_on() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        barrier.wait(10)
        if sync.rank == 0:
            e.lives[0].break_commits = 2
        barrier.wait(10)
        train_step(sync, trainer, 1)
        with pytest.raises(EnginePoisoned):
            sync.wait_committed(1, WAIT_S)
        train_step(sync, trainer, 2)
        sync.wait_committed(2, WAIT_S)
        sync.finished("done")

    barrier = threading.Barrier(4)
    with engine("tp1 pp2", settings=pulling(DENSE)) as e:
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert e.differing(2) == [] and e.records(Failed) == []


@pytest.mark.full
def test_an_engine_that_asks_for_nothing_is_left_behind_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose: the commit begins, and nobody is told."""
    honest = Commits.ask
    monkeypatch.setattr(Commits, "ask", lambda self, bond, key: None if key.version else honest(self, bond, key))
    with engine("tp1 pp2", settings=pulling(NOTHING, commit_s=2)) as e:
        outcomes = train(e.store, versions(1), settings=trainer_settings("a", transfer_s=3.0))
        assert all(isinstance(outcome, SyncError) for outcome in outcomes), outcomes
        eventually(lambda: bool(e.core.poisons))
        assert "0 of " in e.records(Poisoned)[0].reason and "within 1 s" in e.records(Poisoned)[0].reason


def dies_inside_a_pull(sync: TrainerSync, trainer: FakeTrainer, pipe: Connection) -> None:
    version = sync.attach().version + 1
    train_step(sync, trainer, version)
    sync.wait_committed(version, 30)
    honest, posts = PullEmitter.let_go, []

    def let_go(self: PullEmitter) -> None:
        for lane in self._lanes.values():
            lane.post = dying(lane.post)  # type: ignore[method-assign]
        honest(self)

    def dying(post: Any) -> Any:
        def posted(*args: Any) -> None:
            posts.append(args)
            if len(posts) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            post(*args)

        return posted

    if sync.rank == 1:
        PullEmitter.let_go = let_go  # type: ignore[method-assign]
    train_step(sync, trainer, version + 1)
    sync.wait_committed(version + 1, 30)


def two_versions(sync: TrainerSync, trainer: FakeTrainer, pipe: Connection) -> int:
    base = sync.attach().version
    for version in (base + 1, base + 2):
        train_step(sync, trainer, version)
        sync.wait_committed(version, 30)
    sync.finished("done")
    return base


@pytest.mark.full
def test_a_trainer_killed_inside_a_pull_poisons_the_engine_and_the_next_one_heals_it(tmp_path: Path) -> None:
    settings = replace(processes.SETTINGS, staging=NOTHING)
    with processes.engine_processes(EmbeddedServer(tmp_path), settings) as side:
        with processes.trainer_processes(side, "killed", dies_inside_a_pull) as ranks:
            begin = time.monotonic()
            answers = [rank.answer() for rank in ranks if rank is not ranks[1]]
            assert {kind for kind, _ in answers} == {"error"}, answers
        processes.wait_until(lambda: len(side.records(Poisoned)) == 1, 10)
        assert time.monotonic() - begin < PROMPT_S, "far below the pull's own deadline"
        assert side.records(Poisoned)[0].version == 2 and side.core.poisons
        assert [record.version for record in side.records(Committed)] == [1]
        assert side.differing(2), "a part of it was live"
        with processes.trainer_processes(side, "next", two_versions, content=7) as ranks:
            (base,) = {rank.answer() for rank in ranks}
        assert base[0] == "ok" and side.differing(base[1] + 2) == []
