"""A comparison at attach that takes one engine rank more slices than the other. Real gloo lanes, no vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megastream.protocol.records import Attached, Compared, Failed
from megastream.sync import TrainerSync
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.spine import ENGINE_SETTINGS, engine, train, trainer_settings


@pytest.mark.full
def test_a_resumed_training_replaces_the_base_whichever_rank_is_done_first() -> None:
    """Rank 1 has fewer buffers and answers behind rank 0: what it says is the last word of each round."""

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        version = sync.attach().version + 1
        train_step(sync, trainer, version)
        sync.wait_committed(version, 10)
        sync.finished("done")

    with engine("tp1 pp2", settings=replace(ENGINE_SETTINGS, compare_slice_s=1e-6)) as e:
        assert len(e.lives[0].buffers) > len(e.lives[1].buffers) > 1
        assert train(e.store, body, settings=trainer_settings("a")) == [None] * 4
        assert train(e.store, body, version=50, settings=trainer_settings("b")) == [None] * 4
        assert [record.replaced for record in e.records(Attached)] == [False, True]
        assert sorted(record.rank for record in e.records(Compared)) == [0, 0, 1, 1], "each says it once"
        assert e.records(Failed) == [] and e.differing(3) == []
