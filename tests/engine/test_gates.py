"""Gates on the real engine: what every token's stamp says about each unit is what the weights say themselves.

The truth is spelled by the tokens (tests/helpers/reveal.py): the version of the embedding, of an expert in the first
layer, of one in the last layer, and of the head, which are units of both trainer stages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megastream.control.redis_log import RedisLog
from megastream.protocol.journal import SyncError
from megastream.protocol.mix import mixed_versions
from megastream.sync import EngineSync
from tests.helpers import reveal
from tests.helpers.engine import Answer, Engine
from tests.helpers.reveal_trainer import SETTINGS, SlowOrders, training
from tests.helpers.traffic import update_often

pytestmark = pytest.mark.timeout(900)

BASE = 100 * reveal.BASE
PLACES = ("s0.embed", "s0.l0.e0:2", "s1.l3.e6:8", "s1.head")
"""Units of a token's digits."""
SHORT, LONG = (2, 200), pytest.param(50, 20_000, marks=pytest.mark.full)
"""Updates and tokens under a gate."""
COUNTS = [pytest.param(*SHORT, marks=pytest.mark.full), LONG]
HOT = (0, reveal.MOE.experts - 1)
LAYERS, EXPERTS = range(reveal.MOE.layers), range(reveal.MOE.experts)


class Attached:
    """The engine, a trainer whose second stage is slow, and the host that chooses the gate."""

    def __init__(self, engine: Engine, orders: SlowOrders, host: EngineSync) -> None:
        self.engine, self.orders, self.host = engine, orders, host
        self.next_version = BASE + 1

    def update(self, gate: str, updates: int, tokens: int) -> list[Answer]:
        """So many updates under a gate while requests run."""

        async def run() -> list[Answer]:
            await asyncio.to_thread(self.host.set_gate, gate)
            step = partial(asyncio.to_thread, self.orders.update)
            first, self.next_version = self.next_version, self.next_version + updates
            return await update_often(self.engine, first, updates, tokens, step)

        return self.engine.run(run(), timeout_s=60 + updates * 5 + tokens / 20)

    def count(self, answers: list[Answer]) -> dict[str, int]:
        """Tokens; those that met two versions, by the weights and by their stamp; those whose stamp is wrong."""
        found = {"tokens": 0, "met_mix": 0, "stamped_mix": 0, "wrong": 0}
        said: dict[str, tuple[int, ...]] = {}
        for token, label in (pair for a in answers for pair in zip(a.tokens, a.labels(), strict=True)):
            if label not in said:
                said[label] = self.digits_said(label)
            found["tokens"] += 1
            found["met_mix"] += reveal.is_mixed(token)
            found["stamped_mix"] += mixed_versions(label) is not None
            found["wrong"] += reveal.digits(token) != said[label]
        return found

    def digits_said(self, label: str) -> tuple[int, ...]:
        """The digits that a token with this label must spell."""
        versions = self.ask_core("megastream_versions", label)
        units = versions["units"] or dict.fromkeys(PLACES, int(label))
        assert mixed_versions(label) in (None, (versions["oldest"], versions["newest"]))
        assert {versions["oldest"], versions["newest"]} == set(units.values())
        return tuple(units[unit] % reveal.BASE for unit in PLACES)

    @contextmanager
    def lying(self) -> Iterator[None]:
        """The histogram says that the experts of every token are cold, and all others warm."""
        lie = {layer: [0.0 if expert // 2 in (0, HOT[1] // 2) else 9.0 for expert in EXPERTS] for layer in LAYERS}
        self.ask_ranks("feed_use", lie)
        try:
            yield
        finally:
            self.ask_ranks("feed_use", None)

    @contextmanager
    def broken(self, break_it: Callable[[bool], Any]) -> Iterator[None]:
        """While something is broken on purpose; afterwards every unit is written again."""
        break_it(True)
        try:
            yield
        finally:
            break_it(False)
            self.update("version", 1, 50)

    def ask_core(self, utility: str, *args: Any) -> Any:
        return self.engine.run(self.engine.core(utility, *args))

    def ask_ranks(self, method: str, *args: Any) -> list[Any]:
        return self.engine.run(self.engine.ranks(method, *args))


@pytest.fixture(scope="module")
def attached(attachable: Engine, control_url: str) -> Iterator[Attached]:
    attachable.run(attachable.ranks("feed_remove"))
    orders = SlowOrders(BASE)
    log = RedisLog(control_url, attachable.name, reconnect_s=10)
    settings = replace(SETTINGS, launch="gates")  # another start than that of test_attach.py, in the same run
    with training(control_url, attachable.name, orders.train, settings=settings) as errors:
        try:
            yield Attached(attachable, orders, EngineSync(log, engine=attachable.name))
        finally:
            orders.end()
    log.close()
    attachable.run(attachable.ranks("feed_install"))
    assert errors == []


@pytest.mark.parametrize(("updates", "tokens"), [SHORT, LONG])
def test_each_stage_becomes_live_by_itself_and_every_token_says_so(
    attached: Attached, updates: int, tokens: int
) -> None:
    answers = attached.update("stage", updates, tokens)
    found = attached.count(answers)
    assert found["tokens"] >= tokens and found["wrong"] == 0, found
    assert found["met_mix"] == found["stamped_mix"] > 0, found
    label = next(label for a in answers for label in a.labels() if mixed_versions(label))
    assert attached.host.versions(label) == attached.ask_core("megastream_versions", label)["units"]
    spans = [span for a in answers for span in a.between]
    assert spans and all(int(newest) == int(oldest) + 1 for oldest, newest in spans)


@pytest.mark.parametrize(("updates", "tokens"), COUNTS)
def test_idle_experts_become_live_early_and_no_token_meets_them(attached: Attached, updates: int, tokens: int) -> None:
    found = attached.count(attached.update("idle_experts", updates, tokens))
    assert found["tokens"] >= tokens and found["wrong"] == found["met_mix"] == 0, found
    assert found["stamped_mix"] > 0, "no expert was committed early"


@pytest.mark.parametrize(("updates", "tokens"), COUNTS)
def test_a_histogram_that_lies_shows_in_the_tokens_and_never_in_a_wrong_stamp(
    attached: Attached, updates: int, tokens: int
) -> None:
    """The units of the experts that every token is routed to are called cold: tokens meet both versions, and say so."""
    with attached.lying():
        found = attached.count(attached.update("idle_experts", updates, tokens))
    assert found["tokens"] >= tokens and found["wrong"] == 0, found
    assert 0 < found["met_mix"] <= found["stamped_mix"], found


@pytest.mark.parametrize(("updates", "tokens"), COUNTS)
def test_back_at_gate_version_no_token_meets_two(attached: Attached, updates: int, tokens: int) -> None:
    found = attached.count(attached.update("version", updates, tokens))
    assert found["tokens"] >= tokens
    assert found["wrong"] == found["met_mix"] == found["stamped_mix"] == 0, found


@pytest.mark.full
def test_labels_taken_at_output_time_are_counted(attached: Attached) -> None:
    """Broken: with two batches under way, a step's tokens get the label of a later step."""
    if attached.engine.name != "pp2":
        pytest.skip("with one batch under way no commit falls between a step and its output")
    with attached.broken(partial(attached.ask_core, "feed_output_labels")):
        found = attached.count(attached.update("stage", 20, 2000))
    assert found["wrong"] > 0, found


@pytest.mark.full
def test_a_mix_whose_units_are_named_wrong_is_counted(attached: Attached) -> None:
    """Broken: the core says that the units which are ahead are behind."""
    with attached.broken(partial(attached.ask_core, "feed_wrong_mixes")):
        found = attached.count(attached.update("stage", 4, 400))
    assert 0 < found["wrong"] == found["stamped_mix"], found


@pytest.mark.full
def test_a_part_that_is_committed_on_one_rank_only_is_counted(attached: Attached) -> None:
    """Broken: rank 0, which holds the first of a token's experts, writes no part and says that it did."""
    with attached.lying(), attached.broken(partial(attached.ask_ranks, "feed_skip_parts", 0)):
        found = attached.count(attached.update("idle_experts", 2, 100))
    assert found["wrong"] > 0, found


def test_the_histogram_counts_every_token_of_every_layer(attached: Attached) -> None:
    def counts() -> list[dict[int, list[float]]]:
        return attached.ask_ranks("feed_counts")

    before = counts()
    answer = attached.engine.run(attached.engine.ask("counted", [20] * 5, 4, cold=True))
    assert len(answer.tokens) == 4
    for rank_before, rank_after in zip(before, counts(), strict=True):
        assert rank_after, "a rank without a layer of experts"
        for layer, row in rank_after.items():
            new = [after - then for after, then in zip(row, rank_before[layer], strict=True)]
            assert new == [8.0 if expert in HOT else 0.0 for expert in EXPERTS], "5 of the prompt, 3 of the answer"


def test_gates_that_cannot_be_are_refused_by_name_and_the_one_before_holds(attached: Attached) -> None:
    for gate, words in (("pause", "chosen by the trainer"), ("idle", "choose one of version, stage, idle_experts")):
        with pytest.raises(SyncError, match=f"stays at gate [a-z_]+: .*{words}"):
            attached.host.set_gate(gate)
