"""A trainer attaches to the real engine and streams. First of the engine's tests: it still serves version 0 then."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.helpers.engine import Answer, Engine
from tests.helpers.reveal_trainer import Orders, training
from tests.helpers.traffic import count, differing, update_often

pytestmark = pytest.mark.timeout(600)

UPDATES, TOKENS = 24, 5200


def test_no_token_is_mixed_or_mislabelled_when_a_trainer_streams(attachable: Engine, control_url: str) -> None:
    """The plugin as it is wired: agents in the workers, a coordinator in the core, gloo lanes, redis. No stand-ins."""
    orders = Orders()

    async def run() -> list[Answer]:
        assert (await attachable.ask("before", [20] * 4, 3)).labels() == ["0"] * 3
        with training(control_url, attachable.name, orders.train) as errors:
            try:
                update = partial(asyncio.to_thread, orders.update)
                answers = await update_often(attachable, 1, UPDATES, TOKENS, update)
            finally:
                orders.end()
        assert errors == []
        return answers

    answers = attachable.run(run(), timeout_s=300)
    found = count(answers)
    assert found["tokens"] >= 5000
    assert (found["mixed"], found["mislabelled"]) == (0, 0)
    assert len({label for a in answers for label in a.labels()}) >= 20
    assert any(len(a.spans) > 1 for a in answers), "no request lived through an update"
    assert {a.finish_reason for a in answers} == {"length"}, "an update ends no request"
    attachable.run(attachable.ranks("feed_install"))
    assert attachable.run(differing(attachable, UPDATES)) == []
