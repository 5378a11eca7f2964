"""A trainer attaches to the real engine and streams. First of the engine's tests: it still serves version 0 then."""

from __future__ import annotations

import asyncio

import pytest

from megastream.sync import TrainerSync
from tests.helpers.engine import Answer, Engine
from tests.helpers.reveal_trainer import RevealTrainer, step, training
from tests.helpers.traffic import count, differing, traffic

pytestmark = pytest.mark.timeout(600)


def test_a_trainer_streams_into_the_decoding_engine(attachable: Engine, control_url: str) -> None:
    """The plugin as it is wired: agents in the workers, a coordinator in the core, gloo lanes, redis. No stand-ins."""
    versions = range(1, 6)

    def train(sync: TrainerSync, trainer: RevealTrainer) -> None:
        sync.attach()
        for version in versions:
            step(sync, trainer, version)
            sync.wait_committed(version, 30)
        sync.finished("done")

    async def run() -> list[Answer]:
        assert (await attachable.ask("before", [20] * 4, 3)).labels() == ["0"] * 3
        async with traffic(attachable) as answers:
            with training(control_url, attachable.name, train) as errors:
                while (await attachable.core("megastream_status"))["version"] < versions[-1] and not errors:
                    await asyncio.sleep(0.05)
            assert errors == []
            await asyncio.sleep(0.2)
        return answers

    found = count(attachable.run(run(), timeout_s=150))
    assert found["tokens"] > 0 and (found["mixed"], found["mislabelled"]) == (0, 0)
    attachable.run(attachable.ranks("feed_install"))
    assert attachable.run(differing(attachable, versions[-1])) == []
