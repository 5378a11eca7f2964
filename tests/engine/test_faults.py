"""Faults on the real engine, with its own agents, lanes and log: what it had keeps serving, or it says that it is
poisoned; no token is of two versions or under a wrong label; and the next trainer attaches."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from megastream.protocol.mix import mixed_versions
from megastream.protocol.part_records import Mixed
from megastream.protocol.records import Detached, Failed, Poisoned
from tests.helpers import reveal
from tests.helpers.engine import Answer
from tests.helpers.faulty import Faulty, faulty_engine, killed_trainer
from tests.helpers.feed_faults import TOLD
from tests.helpers.gated import count_mixes
from tests.helpers.spoiled import hold_manifest, send_twice, spoil_header
from tests.helpers.told import everything
from tests.helpers.traffic import count, requests

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

SEQ = 5
"""A piece in the first half of a version."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with faulty_engine(tmp_path_factory.mktemp("faults")) as faults:
        yield faults


def clean(answers: list[Answer], *versions: int) -> None:
    """Every request ended by itself, and its tokens are of these versions, as their labels and the weights say."""
    found = count(answers)
    assert found["tokens"] > 0 and (found["mixed"], found["mislabelled"]) == (0, 0), found
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert {label for answer in answers for label in answer.labels()} <= set(map(str, versions))


WRITTEN = pytest.mark.parametrize("written", [False, True], ids=["before the first byte", "half way"])


@WRITTEN
def test_a_write_that_fails_once_on_one_rank_is_repeated_from_staging(faulty: Faulty, written: bool) -> None:
    with faulty.training() as trainer, requests(faulty.engine) as answers:
        before = trainer.update()
        with faulty.broken("feed_break_commits", 1, 1, written):
            after = trainer.update()
            assert faulty.ranks("feed_failed_writes") == [0, 1]
        assert faulty.labels() == {str(after)}
    clean(answers, trainer.base_version, before, after)
    faulty.goes_on(after)


@WRITTEN
def test_a_write_that_fails_twice_poisons_until_a_whole_version_is_live(faulty: Faulty, written: bool) -> None:
    """No token of the version that one rank could not write leaves, although the other rank has written it."""
    with faulty.training() as trainer, requests(faulty.engine) as answers:
        trainer.update()
        with faulty.broken("feed_break_commits", 1, 2, written):
            assert all("is poisoned" in str(word) and TOLD in str(word) for word in trainer.fails())
        failed = trainer.version
        refused = faulty.ask()
        assert (refused.tokens, refused.finish_reason) == ([], "error")
        healed = trainer.update()
        faulty.until(lambda: faulty.ask().finish_reason == "length")
    poisoned = [record.version for record in everything(faulty.log) if isinstance(record, Poisoned)]
    assert poisoned[-1] == failed
    assert str(failed) not in {label for answer in answers for label in answer.labels()}
    lost = [answer for answer in answers if answer.finish_reason == "error"]
    assert lost and not any(reveal.is_mixed(token) for answer in lost for token in answer.tokens)
    served = [answer for answer in answers if answer.finish_reason != "error"]
    clean(served, trainer.base_version, failed - 1, healed)
    faulty.goes_on(healed)


SPOILT: dict[str, tuple[dict[str, Any], str]] = {
    "a corrupt byte": ({"checksum": 1}, "checksum"),
    "another plan": ({"plan_digest": "x"}, "plan_digest is 'x'"),
    "a duplicate": ({}, "duplicate"),
}
"""What is changed in a piece's header, and what its refusal says."""


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_piece_that_cannot_be_taken_ends_the_attachment(
    faulty: Faulty, spoil: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, words = SPOILT[spoil]
    with monkeypatch.context() as patch:
        second = faulty.next_base + 2
        spoil_header(patch, second, SEQ, **changes) if changes else send_twice(patch, second, SEQ)
        with faulty.training() as trainer, requests(faulty.engine) as answers:
            first = trainer.update()
            assert all(words in str(word) for word in trainer.fails())
    clean(answers, trainer.base_version, first)
    faulty.goes_on(first)


UNTAKEN = {"unread": "checksum", "written": f"into staging: {TOLD}", "room": f"no room for staging: .*{TOLD}"}


@pytest.mark.parametrize(("how", "words"), UNTAKEN.items())
def test_what_one_rank_cannot_receive_ends_the_attachment(faulty: Faulty, how: str, words: str) -> None:
    broken = faulty.broken("feed_break_receiving", 1, how)
    with faulty.training() as trainer, requests(faulty.engine) as answers, broken:
        assert all("engine rank 1 failed" in str(word) for word in trainer.fails())
    assert re.search(words, faulty.records(Failed, trainer.base_version)[0].reason)
    clean(answers, trainer.base_version)
    faulty.goes_on(trainer.base_version)


@pytest.mark.parametrize("gate", ["version", "stage"])
def test_a_version_whose_manifest_comes_late_is_live_no_sooner(
    faulty: Faulty, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gate `stage` has made live before it is said in every label, and after `manifest_s` once in the log."""
    faulty.host.set_gate(gate)
    try:
        with monkeypatch.context() as patch:
            held, go = hold_manifest(patch, faulty.next_base + 1)
            with faulty.training() as trainer, requests(faulty.engine) as answers:
                base, version = trainer.base_version, trainer.begin_update()
                assert held.wait(20)
                if gate == "stage":
                    faulty.until(lambda: faulty.records(Mixed, base))
                    assert {mixed_versions(label) for label in faulty.labels()} == {(base, version)}
                else:
                    assert faulty.labels() == {str(base)}
                go.set()
                assert trainer.words() == {version}
                assert faulty.labels() == {str(version)}
        found = count_mixes(faulty.engine, answers)
        assert found["tokens"] > 0 and found["wrong"] == 0 and (found["met_mix"] > 0) is (gate == "stage"), found
        assert found["met_mix"] == found["stamped_mix"]
    finally:
        faulty.host.set_gate("version")
    faulty.goes_on(version)


def test_an_engine_that_somebody_else_has_paused_takes_versions_and_goes_on(faulty: Faulty) -> None:
    """Requests stand still meanwhile: their next token is of the newest version, and none is of those between."""
    engine = faulty.engine
    with faulty.training() as trainer:
        with requests(engine) as answers:
            time.sleep(0.3)
            engine.run(engine.llm.pause_generation(mode="keep", clear_cache=False))
            versions = [trainer.update() for _ in range(2)]
            with pytest.raises(Exception, match="a trainer that streams is attached"):
                engine.run(engine.llm.start_weight_update())
            engine.run(engine.llm.resume_generation())
            time.sleep(0.3)
        clean(answers, trainer.base_version, versions[-1])
        assert any(len(answer.spans) == 2 for answer in answers), "no request was under way"
    faulty.goes_on(versions[-1])


def test_a_sender_killed_in_the_middle_of_a_piece(faulty: Faulty) -> None:
    with requests(faulty.engine) as answers:
        base = killed_trainer(faulty)
        faulty.until(lambda: faulty.records(Detached, base))
        assert faulty.labels() == {str(base + 1)}
    assert faulty.records(Failed, base)[0].side == "engine"
    assert count(answers)["mixed"] == count(answers)["mislabelled"] == 0
    assert {answer.finish_reason for answer in answers} == {"length"}
    faulty.goes_on(base + 1)


def test_redis_is_restarted_and_flushed_in_the_middle_of_training(faulty: Faulty) -> None:
    """A server that writes nothing to disk comes back empty."""
    with faulty.training() as trainer, requests(faulty.engine) as answers:
        trainer.update()
        faulty.server.stop()
        time.sleep(1)
        faulty.server.start()
        trainer.update()
        with redis.Redis.from_url(faulty.server.url) as client:
            client.flushall()
        last = trainer.update()
        assert faulty.labels() == {str(last)}
    clean(answers, *range(trainer.base_version, last + 1))
    faulty.goes_on(last)


def test_replies_that_are_shifted_are_seen(faulty: Faulty) -> None:
    """Broken: a worker call raises on one rank, which none of ours does. Last: the engine is of no use afterwards."""

    def ranks() -> list[Any]:
        return [reply and reply["rank"] for reply in faulty.ranks("megastream_call", "status", {})]

    assert ranks() == [0, 1]
    with pytest.raises(Exception, match=TOLD):
        faulty.ranks("feed_raise", 0)
    assert ranks() == [0, None]
