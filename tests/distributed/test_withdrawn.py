"""A version that was begun and does not count: taken back over real lanes, dropped by the engine, emitted again."""

from __future__ import annotations

from megastream.engine.contract import CommitRequest
from megastream.protocol.records import Accepted, Committed, Emitted, Failed, Sealed
from megastream.sync import TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.spine import engine, eventually, train, trainer_settings
from tests.helpers.synthetic import fill


def test_a_version_that_does_not_count_is_withdrawn_and_its_next_attempt_goes_live() -> None:
    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        train_step(sync, trainer, 1)
        sync.wait_leases()
        sync.begin(2, train_step=2)  # its step breaks off behind the first bucket on some ranks, behind all on others
        fill(trainer.layout, trainer.buffers, 9)
        names = list(trainer.buffers)
        for buffer in names if sync.rank % 2 else names[:1]:
            sync.final(buffer)
        train_step(sync, trainer, 2)
        sync.wait_committed(2, 10)
        sync.finished("done")

    with engine("tp1 pp2") as e:
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert e.differing(2) == [] and e.records(Failed) == []
        assert [record.version for record in e.records(Committed)] == [1, 2]
        wasted = [record for record in e.records(Emitted) if (record.version, record.attempt) == (2, 0)]
        assert wasted and all(record.wire_bytes > record.payload_bytes > 0 for record in wasted)
        assert {record.attempt for record in e.records(Accepted) if record.version == 2} == {1}


def test_the_engine_forgets_what_it_prepared_of_a_withdrawn_attempt() -> None:
    """All of attempt 0 is in and sealed on every rank before it is withdrawn."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        e.core.hold.clear()
        sync.begin(1, train_step=1)
        fill(trainer.layout, trainer.buffers, 9)
        for buffer in trainer.buffers:
            sync.final(buffer)
        eventually(lambda: len([r for r in e.records(Sealed) if r.version == 1]) == len(e.agents))
        train_step(sync, trainer, 1)
        sync.wait_leases()
        eventually(lambda: len([r for r in e.records(Sealed) if r.attempt == 1]) == len(e.agents))
        if sync.rank == 0:
            stale = e.agents[0].commit(CommitRequest("i1", 1, 1, 0))
            e.core.hold.set()
            assert not stale.ok and "attempt 0 is not prepared here" in stale.error
        sync.wait_committed(1, 10)
        sync.finished("done")

    with engine("tp1 pp2") as e:
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert e.differing(1) == []
