"""Gates on the real engine: what every token's stamp says about each unit is what the weights say themselves.

The truth is spelled by the tokens (tests/helpers/reveal.py): the version of the embedding, of an expert in the first
layer, of one in the last layer, and of the head, which are units of both trainer stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from megastream.control.redis_log import RedisLog
from megastream.protocol.journal import SyncError
from megastream.protocol.mix import mixed_versions
from megastream.sync import EngineSync
from tests.engine.conftest import GATED
from tests.helpers import reveal
from tests.helpers.engine import Engine
from tests.helpers.gated import EXPERTS, HOT, Attached
from tests.helpers.hard_traffic import hard_traffic
from tests.helpers.reveal_trainer import SETTINGS, SlowOrders, training
from tests.helpers.traffic import Load, traffic

pytestmark = [pytest.mark.timeout(900), pytest.mark.parametrize("attachable", GATED, indirect=True, scope="session")]

BASE = 100 * reveal.BASE
SHORT, HARD = (2, 200, traffic), pytest.param(10, 2000, hard_traffic, marks=pytest.mark.full)
"""Updates and tokens under a gate, and what requests run."""
COUNTS = [pytest.param(*SHORT, marks=pytest.mark.full), HARD]
MANY = [COUNTS[0], pytest.param(50, 20_000, hard_traffic, marks=pytest.mark.full)]
KINDS = ("updates", "tokens", "load")


@pytest.fixture(scope="module")
def attached(attachable: Engine, control_url: str) -> Iterator[Attached]:
    attachable.run(attachable.ranks("feed_remove"))
    orders = SlowOrders(BASE)
    log = RedisLog(control_url, attachable.name, reconnect_s=60)
    settings = replace(SETTINGS, launch="gates")  # another start than that of test_attach.py, in the same run
    with training(control_url, attachable.name, orders.train, settings=settings) as errors:
        try:
            yield Attached(attachable, orders, EngineSync(log, engine=attachable.name), BASE + 1)
        finally:
            orders.end()
    log.close()
    attachable.run(attachable.ranks("feed_install"))
    assert errors == []


@pytest.mark.parametrize(KINDS, [SHORT, HARD])
def test_each_stage_becomes_live_by_itself_and_every_token_says_so(
    attached: Attached, updates: int, tokens: int, load: Load
) -> None:
    answers = attached.update("stage", updates, tokens, load)
    found = attached.count(answers)
    assert found["tokens"] >= tokens and found["wrong"] == 0, found
    assert found["met_mix"] == found["stamped_mix"] > 0, found
    label = next(label for a in answers for label in a.labels() if mixed_versions(label))
    assert attached.host.versions(label) == attached.ask_core("megastream_versions", label)["units"]
    spans = [span for a in answers for span in a.between]
    assert spans and all(int(newest) == int(oldest) + 1 for oldest, newest in spans)


@pytest.mark.parametrize(KINDS, COUNTS)
def test_idle_experts_become_live_early_and_no_token_meets_them(
    attached: Attached, updates: int, tokens: int, load: Load
) -> None:
    found = attached.count(attached.update("idle_experts", updates, tokens, load))
    assert found["tokens"] >= tokens and found["wrong"] == found["met_mix"] == 0, found
    assert found["stamped_mix"] > 0, "no expert was committed early"


@pytest.mark.parametrize(KINDS, COUNTS)
def test_a_histogram_that_lies_shows_in_the_tokens_and_never_in_a_wrong_stamp(
    attached: Attached, updates: int, tokens: int, load: Load
) -> None:
    """The units of the experts that every token is routed to are called cold: tokens meet both versions, and say so."""
    with attached.lying():
        found = attached.count(attached.update("idle_experts", updates, tokens, load))
    assert found["tokens"] >= tokens and found["wrong"] == 0, found
    assert 0 < found["met_mix"] <= found["stamped_mix"], found


@pytest.mark.parametrize(KINDS, MANY)
def test_back_at_gate_version_no_token_meets_two(attached: Attached, updates: int, tokens: int, load: Load) -> None:
    found = attached.count(attached.update("version", updates, tokens, load))
    assert found["tokens"] >= tokens
    assert found["wrong"] == found["met_mix"] == found["stamped_mix"] == 0, found


@pytest.mark.full
def test_requests_had_to_wait_for_room_and_start_again(attached: Attached) -> None:
    """Run after the traffic above, which does not fit into the small cache."""
    assert attached.ask_core("feed_preempted") > 0


@pytest.mark.full
def test_labels_taken_at_output_time_are_counted(attached: Attached) -> None:
    """Broken: with two batches under way, a step's tokens get the label of a later step."""
    if "pp2" not in attached.engine.name:
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
