"""The fence: no token meets two versions, and every token's label is right; broken on purpose, both are counted."""

from __future__ import annotations

import asyncio
import time
from statistics import median

import pytest
import torch

from tests.helpers import reveal
from tests.helpers.engine import Engine
from tests.helpers.traffic import commit, count, stage, traffic, update_often

pytestmark = pytest.mark.timeout(600)

UPDATES, TOKENS = 8, 1500
STALLED_S = 10.0
"""A busy machine may stand still for seconds; a core that waits for input would do so until the next request."""


def test_first_update_with_no_request_in_flight(engine: Engine) -> None:
    """Committed and acknowledged within a second although the core waits for input."""

    async def run() -> None:
        seconds = []
        for version in range(1, 6):
            await stage(engine, version)
            started = time.monotonic()
            await engine.core("feed_commit", version)
            seconds.append(time.monotonic() - started)
        assert median(seconds) < 1 and max(seconds) < STALLED_S, seconds
        after = await engine.ask("after", [20] * 4, 3)
        assert after.labels() == ["5"] * 3 and not any(map(reveal.is_mixed, after.tokens))

    engine.run(run())


def test_last_request_ends_right_after_a_commit(engine: Engine) -> None:
    """Nothing would read the replies of such a commit: the core drains them before it waits for input."""

    async def run() -> None:
        seconds = []
        for version, length in enumerate((1, 2, 3, 5, 8), start=6):
            await stage(engine, version)
            request = asyncio.create_task(engine.ask(f"last-{version}", [20] * 4, length))
            await asyncio.sleep(0.002 * length)
            started = time.monotonic()
            replies = await engine.core("feed_commit", version)
            assert all(reply["ok"] for reply in replies)
            seconds.append(time.monotonic() - started)
            assert count([await request])["mixed"] == 0
        assert median(seconds) < 1 and max(seconds) < STALLED_S, seconds

    engine.run(run())


def test_no_token_is_mixed_or_mislabelled(engine: Engine) -> None:
    """As the broken fences below, only right. test_live.py does it with a trainer, more often and for longer."""
    answers = engine.run(
        update_often(engine, 20, UPDATES, TOKENS, lambda version: commit(engine, version)), timeout_s=150
    )
    found = count(answers)
    assert found["tokens"] >= TOKENS
    assert (found["mixed"], found["mislabelled"]) == (0, 0)
    assert len({label for a in answers for label in a.labels()}) >= UPDATES
    spans = [a.spans for a in answers]
    assert [a.carried for a in answers] == spans, "kv_transfer_params carry the same spans as vLLM's own field"
    assert any(len(s) > 1 for s in spans), "no request lived through an update"


def test_records_cover_every_step_on_every_rank(engine: Engine) -> None:
    """Run after the traffic above: stamp, live version on each rank, and the outputs' labels are joined."""

    on_gpu = torch.cuda.is_available()

    async def run() -> None:
        records = await engine.core("megastream_records")
        batches = {step: (label, tokens) for step, label, tokens in records["batches"]}
        assert sum(len(tokens) for _, tokens in batches.values()) > 0
        for rank in records["ranks"]:
            assert dict(rank).keys() == batches.keys() == set(range(1, records["steps"] + 1))
            assert [step for step, label in rank if batches[step][0] != label] == []
        for commits in records["commits"]:
            assert len(commits) >= UPDATES
            assert all(host_s > 0 and (device_s is not None) == on_gpu for _, host_s, device_s in commits)

    engine.run(run())


def test_unordered_commits_are_counted(engine: Engine) -> None:
    """Broken: each rank writes from a thread of its own. The ranks notice, which here is not acted on."""

    async def unordered(version: int) -> None:
        await stage(engine, version)
        await engine.core("feed_stamp", str(version))
        await engine.ranks("feed_unordered", version, 0.03)
        await asyncio.sleep(0.1)

    async def run() -> None:
        await engine.core("feed_deaf", True)
        found = count(await update_often(engine, 100, 5, 1000, unordered))
        ranks = (await engine.core("megastream_status"))["ranks"]
        await engine.core("feed_deaf", False)
        assert found["mixed"] > 0 and found["mislabelled"] > 0, found
        assert all(rank["differences"] > 0 for rank in ranks)

    engine.run(run(), timeout_s=120)


def test_labels_taken_at_output_time_are_counted(engine: Engine) -> None:
    """Broken: a token is labelled with what the engine was told last, as vLLM does without us."""

    async def told_late(version: int) -> None:
        await commit(engine, version)
        await engine.core("feed_label", str(version))

    async def run() -> None:
        await commit(engine, 199)
        await engine.core("feed_late_labels", True)
        found = count(await update_often(engine, 200, 10, 1500, told_late))
        await engine.core("feed_late_labels", False)
        assert found["mixed"] == 0 and found["mislabelled"] > 0, found

    engine.run(run(), timeout_s=120)


def test_a_rank_that_skips_a_commit_is_counted(engine: Engine) -> None:
    """Broken: rank 1 says that it committed, and did not. No stamp can show this; the tokens do."""

    async def run() -> None:
        await engine.ranks("feed_behave", 1, "skip")
        found = count(await update_often(engine, 300, 3, 600, lambda version: commit(engine, version)))
        await engine.ranks("feed_behave", 1, "")
        await commit(engine, 303)
        assert found["mixed"] > 0, found

    engine.run(run(), timeout_s=120)


def test_a_failed_commit_poisons_until_one_succeeds(engine: Engine) -> None:
    """Rank 1 cannot commit: no token of that version comes out, requests end as retryable, new ones are refused."""

    async def run() -> None:
        await commit(engine, 400)
        await engine.ranks("feed_behave", 1, "fail")
        async with traffic(engine) as answers:
            await asyncio.sleep(0.3)
            await stage(engine, 401)
            replies = await engine.core("feed_commit", 401)
            assert [reply["ok"] for reply in replies] == [True, False]
            assert "told to fail" in (await engine.core("megastream_status"))["poisoned"]
            refused = await engine.ask("refused", [20] * 4, 3)
            assert (refused.tokens, refused.finish_reason) == ([], "error")
            await engine.ranks("feed_behave", 1, "")
            replies = await engine.core("feed_commit", 401)
            assert all(reply["ok"] for reply in replies)
            while (await engine.ask("again", [20] * 4, 3)).finish_reason == "error":
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
        assert any(a.finish_reason == "error" for a in answers)
        found = count([a for a in answers if a.finish_reason == "length"])
        assert (found["mixed"], found["mislabelled"]) == (0, 0)
        assert not [t for a in answers if a.finish_reason == "error" for t in a.tokens if reveal.is_mixed(t)]
        assert not (await engine.core("megastream_status"))["poisoned"]

    engine.run(run())


def test_a_rank_with_another_live_version_is_reported(engine: Engine) -> None:
    """The stamp moves without a commit: every rank reports the first such step, and its tokens are discarded."""

    async def run() -> None:
        before = sum(r["differences"] for r in (await engine.core("megastream_status"))["ranks"])
        await engine.core("feed_stamp", "499")
        answer = await engine.ask("differs", [20] * 4, 5)
        status = await engine.core("megastream_status")
        assert (answer.tokens, answer.finish_reason) == ([], "error")
        assert sum(rank["differences"] for rank in status["ranks"]) > before and "another version" in status["poisoned"]
        await commit(engine, 500)
        assert (await engine.ask("recovered", [20] * 4, 3)).labels() == ["500"] * 3

    engine.run(run())
