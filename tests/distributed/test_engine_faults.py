"""What goes wrong on an engine's side, over real gloo lanes: the version before keeps serving, and the next trainer
attaches. The real engine meets the same in tests/engine/test_faults.py."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any

import pytest

from megastream.engine import stream
from megastream.engine.staging import StagingMemory
from megastream.protocol.records import Committed, Emitted, Failed
from megastream.sync import SyncError, TrainerSettings, TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.spine import ENGINE_SETTINGS, Engine, engine, train, trainer_settings
from tests.helpers.spoiled import send_twice, spoil_header

Seqs = dict[str, int]
SPOILT: dict[str, tuple[dict[str, Any], str]] = {
    "a corrupt byte": ({"checksum": 1}, "checksum"),
    "another plan": ({"plan_digest": "x"}, "plan_digest is 'x'"),
    "a duplicate": ({}, "duplicate"),
}
"""What is changed in a piece's header, and what its refusal says."""


WAIT_S = 60.0
ROOMY = replace(
    ENGINE_SETTINGS, bind_s=WAIT_S, transfer_s=WAIT_S, liveness_s=2 * WAIT_S, commit_s=WAIT_S, detach_s=WAIT_S
)
"""Nothing here is noticed by a deadline."""


def roomy(launch: str) -> TrainerSettings:
    return trainer_settings(launch, bind_s=WAIT_S, transfer_s=WAIT_S, attach_s=WAIT_S, ready_s=WAIT_S)


def some_pieces(sync: TrainerSync, engine_rank: int) -> Seqs:
    """The first, a middle and the last piece of one engine rank."""
    seqs = [piece.seq for piece in sync.plan.by_target[engine_rank]]
    return {"first": seqs[0], "middle": seqs[len(seqs) // 2], "last": seqs[-1]}


def two_versions(armed: Any = lambda sync: None) -> Any:
    """Version 1 becomes live; `armed(sync)` runs once, on rank 0, before version 2 begins."""
    barrier = threading.Barrier(4)

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        train_step(sync, trainer, 1)
        sync.wait_committed(1, WAIT_S)
        barrier.wait(WAIT_S)
        if sync.rank == 0:
            armed(sync)
        barrier.wait(WAIT_S)
        train_step(sync, trainer, 2)
        sync.wait_committed(2, WAIT_S)
        sync.finished("done")

    return body


def goes_on(e: Engine, content: int, version: int) -> None:
    """The engine serves `content` whole, and a new trainer that begins there makes `version` live."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach(base_version=version - 1)
        train_step(sync, trainer, version)
        sync.wait_committed(version, WAIT_S)
        sync.finished("done")

    assert e.differing(content) == [] and e.core.poisons == []
    assert train(e.store, body, version=content, settings=roomy(f"next-{version}")) == [None] * 4
    assert e.differing(version) == []


@pytest.mark.parametrize("sets_before", [0, pytest.param(1, marks=pytest.mark.full)])
def test_staging_without_room_ends_the_attachment_by_name(sets_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank, for the base version or for the next one: the engine serves what it had."""
    honest, allocated = StagingMemory._allocate, []

    def allocate(self: StagingMemory, name: str) -> Any:
        rank_0 = e.agents[0]._current
        if rank_0 is not None and self is rank_0.sink._memory:
            allocated.append(name)
            if len(allocated) > sets_before * len(self._specs):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore of it")
        return honest(self, name)

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        train_step(sync, trainer, 1)
        sync.wait_committed(1, WAIT_S)

    with engine("tp1 pp2", settings=ROOMY) as e:
        with monkeypatch.context() as patch:
            patch.setattr(StagingMemory, "_allocate", allocate)
            outcomes = train(e.store, body, settings=roomy("a"))
        assert all(isinstance(outcome, SyncError) for outcome in outcomes), outcomes
        reason = e.records(Failed)[0].reason
        assert reason.startswith("no room for staging: ") and "of host memory, one of 2 sets (Default" in reason
        assert "more of it" not in reason and "staging_sets lower" in reason and e.records(Failed)[0].rank == 0
        assert e.core.commits == []
        goes_on(e, 0, 5)


@pytest.mark.full
@pytest.mark.parametrize("which", ["first", "middle", "last"])
def test_a_rank_that_cannot_write_a_piece_ends_the_version_on_all_ranks(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, broken = stream.scatter, []

    def scatter(piece: Any, *rest: Any) -> int:
        if piece.seq in broken:
            raise RuntimeError("injected: the write failed")
        return honest(piece, *rest)

    monkeypatch.setattr(stream, "scatter", scatter)
    with engine("tp2 ep2", settings=ROOMY) as e:
        body = two_versions(lambda sync: broken.append(some_pieces(sync, 1)[which]))
        outcomes = train(e.store, body, settings=roomy("a"))
        assert all(isinstance(outcome, SyncError) for outcome in outcomes), outcomes
        words = r"engine rank 1 failed: piece \d+ \(s.*, version 2\) could not be written into staging: injected"
        assert all(re.search(words, str(outcome)) for outcome in outcomes), outcomes
        assert [record.version for record in e.records(Committed)] == [1]
        broken.clear()
        goes_on(e, 1, 5)


@pytest.mark.full
@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoiled_piece_at_either_end_of_a_version_leaves_the_version_before(
    spoil: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which pieces a version has is learnt from a run that only looks."""
    seqs: Seqs = {}
    changes, words = SPOILT[spoil]
    with engine("tp1 pp2", settings=ROOMY) as e:
        looks = two_versions(lambda sync: seqs.update(some_pieces(sync, 1)))
        assert train(e.store, looks, settings=roomy("looks")) == [None] * 4
    with engine("tp1 pp2", settings=ROOMY) as e:
        with monkeypatch.context() as patch:
            spoil_header(patch, 2, seqs[which], **changes) if changes else send_twice(patch, 2, seqs[which])
            outcomes = train(e.store, two_versions(), settings=roomy("a"))
        assert all(isinstance(outcome, SyncError) for outcome in outcomes), outcomes
        assert words in e.records(Failed)[0].reason
        assert [record.version for record in e.records(Committed)] == [1]
        goes_on(e, 1, 5)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["tp1", "tp1 pp2(2,1) ep2", "tp1 pp3"])
@pytest.mark.parametrize("engine_mesh", ["tp1", "tp1 pp2", "tp2 ep2", "tp2 pp2 ep2"])
def test_every_stage_of_the_trainer_sends_to_every_rank_that_needs_it(mesh: str, engine_mesh: str) -> None:
    """As many lanes as pairs, each with an address of its own: nobody has to know the other side's stages."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        for version in (1, 2):
            train_step(sync, trainer, version)
            sync.wait_committed(version, WAIT_S)
        sync.finished("done")

    with engine(engine_mesh, settings=ROOMY) as e:
        wrong = e.watch()
        outcomes = train(e.store, body, settings=roomy("a"), mesh=mesh)
        assert set(outcomes) == {None} and wrong == e.differing(2) == []


@pytest.mark.full
@pytest.mark.parametrize("piece_bytes", [251, 997, 2049, 1 << 26])
def test_bytes_do_not_depend_on_how_large_pieces_are(piece_bytes: int) -> None:
    """Smaller than a row, primes, one byte above a tensor, above the model: what arrives is counted, and the same."""
    with engine("tp2 ep2", settings=ROOMY) as e:
        settings = replace(roomy("a"), piece_bytes=piece_bytes)
        assert train(e.store, two_versions(), settings=settings) == [None] * 4
        assert e.differing(2) == []
        sent = [record for record in e.records(Emitted) if record.version == 2]
        held = sum(buffer.numel() for live in e.lives for buffer in live.buffers.values())
        assert len(sent) == 4 and sum(record.elements for record in sent) <= held
        assert (sum(record.pieces for record in sent) > 300) is (piece_bytes == 251)
