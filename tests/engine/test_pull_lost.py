"""A real engine that stages nothing, and whose trainer is killed while it pulls a version inside the commit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megastream.protocol.records import Attached, Detached, Poisoned
from tests.helpers import reveal
from tests.helpers.faulty import Faulty, faulty_engine, killed_trainer
from tests.helpers.told import everything
from tests.helpers.traffic import count, differing, requests

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


@pytest.fixture(scope="module")
def unstaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    with faulty_engine(tmp_path_factory.mktemp("pull"), staging={"device_bytes": 0, "host_bytes": 0}) as faults:
        yield faults


def test_a_trainer_killed_inside_a_pull_poisons_the_engine_and_the_next_one_heals_it(unstaged: Faulty) -> None:
    """No token of the version that came in part leaves, none is mixed, and every byte is the next trainer's."""
    with requests(unstaged.engine) as answers:
        base = killed_trainer(unstaged, "pull")
        unstaged.until(lambda: unstaged.records(Detached, base))
        broken = base + 2
        poisoned = [record for record in everything(unstaged.log) if isinstance(record, Poisoned)]
        assert [record.version for record in poisoned] == [broken] and "were pulled, then" in poisoned[0].reason
        refused = unstaged.ask()
        assert (refused.tokens, refused.finish_reason) == ([], "error"), "what it holds is of no version"
        with unstaged.training() as trainer:
            (attached,) = unstaged.records(Attached, trainer.base_version)
            assert attached.version == trainer.base_version
            assert unstaged.labels() == {str(trainer.base_version)}
            healed = trainer.update()
            assert unstaged.labels() == {str(healed)}
    whole = [answer for answer in answers if answer.finish_reason == "length"]
    lost = [answer for answer in answers if answer.finish_reason == "error"]
    assert whole and lost and len(whole) + len(lost) == len(answers)
    assert not any(reveal.is_mixed(token) for answer in lost for token in answer.tokens)
    assert count(whole)["mixed"] == count(whole)["mislabelled"] == 0
    assert str(broken) not in {label for answer in whole for label in answer.labels()}
    unstaged.holds(healed)
    unstaged.goes_on(healed)


def test_half_a_version_is_seen_in_the_live_bytes(unstaged: Faulty) -> None:
    """What the test above relies on: without the healing, live bytes are of no version."""
    base = killed_trainer(unstaged, "pull")
    unstaged.until(lambda: unstaged.records(Detached, base))
    unstaged.ranks("feed_install")
    try:
        for version in (base + 1, base + 2):
            assert unstaged.engine.run(differing(unstaged.engine, version)), version
    finally:
        unstaged.ranks("feed_remove")
