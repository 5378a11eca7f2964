"""`megastream swap-expert` on the real engine, with requests running: what tokens spell is what their stamps say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megastream.rl.swap_expert import run_swap_expert
from megastream.sync import TrainerSync
from tests.helpers import reveal
from tests.helpers.engine import Answer, Engine
from tests.helpers.reveal_trainer import SETTINGS, RevealTrainer, training
from tests.helpers.tiny_moe import write_checkpoint
from tests.helpers.traffic import traffic

pytestmark = pytest.mark.timeout(300)

BASE = 10_000
"""Above the versions of all other tests."""
OTHER = 4
"""The version whose experts are tried; the engine serves what spells 0."""
LAST = (reveal.MOE.layers - 1, reveal.MOE.experts - 1)
PLACES = {(0, 0): 1, LAST: 2}
"""The experts that a token's digits name."""


class Swapping:
    """An engine at a version that spells 0, no trainer any more, and two checkpoints."""

    def __init__(self, engine: Engine, url: str, folders: dict[int, Path]) -> None:
        self.engine, self._url, self.folders, self._starts = engine, url, folders, 0

    def trained(self) -> None:
        """A trainer attaches, with weights that spell 0, and goes."""

        def body(sync: TrainerSync, trainer: RevealTrainer) -> None:
            sync.attach(base_version=BASE * self._starts)
            sync.finished("done")

        self._starts += 1
        settings = replace(SETTINGS, launch=f"swap-{self._starts}")
        with training(self._url, self.engine.name, body, settings=settings) as errors:
            pass
        assert errors == []

    def swap(self, expert: tuple[int, int], version: int) -> int:
        """The command's exit status."""
        where: dict[str, Any] = dict(redis_url=self._url, run_id=self.engine.name, engine="", deadline_s=30)
        return run_swap_expert(self.folders[version], *expert, **where)

    def ask_core(self, utility: str, *args: Any) -> Any:
        return self.engine.run(self.engine.core(utility, *args))

    def label(self) -> int:
        return int(self.ask_core("megastream_status")["label"])

    def digests(self) -> list[dict[str, str]]:
        replies = self.engine.run(self.engine.ranks("megastream_call", "digest", {}))
        assert all(reply["ok"] for reply in replies), replies
        return [reply["digests"] for reply in replies]


@pytest.fixture(scope="module")
def swapping(attachable: Engine, control_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swapping]:
    attachable.run(attachable.ranks("feed_remove"))
    folders = {
        version: write_checkpoint(tmp_path_factory.mktemp(f"v{version}"), reveal.MOE, reveal.weights(version))
        for version in (0, OTHER)
    }
    found = Swapping(attachable, control_url, folders)
    found.trained()
    yield found
    attachable.run(attachable.ranks("feed_install"))


def spelled(answers: list[Answer]) -> dict[str, set[tuple[int, ...]]]:
    """What tokens of each label spell."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for token, label in (pair for a in answers for pair in zip(a.tokens, a.labels(), strict=True)):
        found.setdefault(label, set()).add(reveal.digits(token))
    return found


@pytest.mark.parametrize("expert", [(0, 0), pytest.param(LAST, marks=pytest.mark.full)])
def test_an_expert_is_swapped_between_two_steps_and_taken_back(swapping: Swapping, expert: tuple[int, int]) -> None:
    before, first, engine = swapping.digests(), swapping.label(), swapping.engine

    async def run() -> list[Answer]:
        async with traffic(engine) as answers:
            for version in (OTHER, 0):
                start = engine.num_tokens
                while engine.num_tokens < start + 60:
                    await asyncio.sleep(0.005)
                assert await asyncio.to_thread(partial(swapping.swap, expert, version)) == 0
        return answers

    answers = engine.run(run(), timeout_s=120)
    old = (0,) * reveal.PLACES
    new = tuple(OTHER if place == PLACES[expert] else 0 for place in range(reveal.PLACES))
    assert spelled(answers) == {str(first): {old}, str(first + 1): {new}, str(first + 2): {old}}
    assert any(len(a.spans) > 1 for a in answers), "no request lived through a swap"
    assert swapping.digests() == before


@pytest.mark.full
def test_the_rest_of_an_engine_is_what_it_was(swapping: Swapping) -> None:
    """The expert of the first layer is one row of two stacked parameters on one rank (all of them under TP alone)."""
    before = swapping.digests()
    assert swapping.swap((0, 0), OTHER) == 0
    after = swapping.digests()
    changed = {name for mine, yours in zip(before, after, strict=True) for name in mine if mine[name] != yours[name]}
    assert changed == {f"model.layers.0.mlp.experts.routed_experts.{which}_weight" for which in ("w13", "w2")}
    assert swapping.swap((0, 0), 0) == 0 and swapping.digests() == before


@pytest.mark.full
def test_what_stands_against_a_swap_is_one_line(swapping: Swapping, capsys: pytest.CaptureFixture[str]) -> None:
    """An expert that is not there; an engine whose core found its ranks at another version than it thought."""
    assert swapping.swap((0, 99), 0) == 1
    assert capsys.readouterr().err == (
        "megastream swap-expert: expert 99 is not in layer 0, whose experts are 0 to 7\n"
    )
    swapping.ask_core("feed_stamp", str(swapping.label()) + "0")
    swapping.engine.run(swapping.engine.ask("poisons", [20] * 4, 4))
    assert swapping.ask_core("megastream_status")["poisoned"]
    assert swapping.swap((0, 0), OTHER) == 1
    assert "serves version" in capsys.readouterr().err
    swapping.trained()
    assert swapping.ask_core("megastream_status")["poisoned"] == ""
    assert swapping.swap((0, 0), OTHER) == swapping.swap((0, 0), 0) == 0
