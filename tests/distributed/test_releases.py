"""Sides of unlike releases: refused by name before a lane is open, on both sides, and the engine serves on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from megastream.engine import agent
from megastream.protocol.records import PROTOCOL, EngineReady, Failed, LanesOpen
from megastream.sync import TrainerSync
from megastream.sync.binding import Binder
from tests.helpers.fake_trainer import FakeTrainer, train_step
from tests.helpers.spine import ENGINE_SETTINGS, Engine, engine, train, trainer_settings

pytestmark = pytest.mark.full

NEWER = PROTOCOL + 1


def refused(e: Engine, words: str) -> None:
    outcomes = train(e.store, lambda sync, trainer: sync.attach(), settings=trainer_settings("a"))  # type: ignore
    assert len(outcomes) == 4 and all(words in str(outcome) for outcome in outcomes), outcomes
    assert e.records(LanesOpen) == [] and e.core.commits == [] and words in e.records(Failed)[0].reason


def test_a_trainer_of_another_protocol_is_refused_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Binder.attach_record

    def newer(self: Binder, *args: Any, **named: Any) -> Any:
        return msgspec.structs.replace(honest(self, *args, **named), protocol=NEWER)

    def body(sync: TrainerSync, trainer: FakeTrainer) -> None:
        sync.attach()
        train_step(sync, trainer, 1)
        sync.wait_committed(1, 10)
        sync.finished("done")

    with engine("tp1 pp2", settings=ENGINE_SETTINGS) as e:
        with monkeypatch.context() as patch:
            patch.setattr(Binder, "attach_record", newer)
            refused(e, f"the trainer speaks protocol {NEWER}, engine e {PROTOCOL}; use equal releases")
        assert train(e.store, body, settings=trainer_settings("b")) == [None] * 4, "the next one attaches"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": NEWER}, f"engine e, rank 1 (x) speaks protocol {NEWER}, this trainer {PROTOCOL}; use equal"),
        ({"library": "y"}, "engine e: rank 1 has y, rank 0 has x; all ranks of a side need the same release"),
    ],
)
def test_an_engine_rank_of_another_release_is_refused_by_the_trainer(
    changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ready(**said: Any) -> EngineReady:
        return EngineReady(**{**said, "library": "x", **(changes if said["rank"] == 1 else {})})

    monkeypatch.setattr(agent, "EngineReady", ready)
    with engine("tp1 pp2", settings=ENGINE_SETTINGS) as e:
        refused(e, words)
