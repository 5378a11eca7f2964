"""Keys and values of older versions: never hit by who starts later, said in every answer, recomputed when asked for.

What they should be is told by the engine itself without its prefix cache, on weights that are all random.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from megastream.engine.vllm import compat
from megastream.engine.vllm.compat_core import Scheduled
from megastream.engine.vllm.kv import KvBook
from tests.helpers.engine import Answer, Engine
from tests.helpers.feed import RANDOM
from tests.helpers.traffic import commit, stage

pytestmark = pytest.mark.timeout(600)

PROMPT = [17 + 7 * n % 1200 for n in range(300)]
BLOCK = 16 if torch.cuda.is_available() else 128
HIT = (len(PROMPT) - 1) // BLOCK * BLOCK
"""Whole blocks of the cache; the prompt's last token is always computed."""
LENGTH = 150
V1, V2, V3 = RANDOM + 50, RANDOM + 51, RANDOM + 52


@pytest.fixture(autouse=True)
def salted_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.run(engine.core("megastream_kv", "salt"))


def same(answer: Answer, cold: Answer) -> bool:
    """Both computed the same: a stale prefix of random weights shows in every logprob."""
    assert cold.cached == 0
    close = all(abs(a - b) < 0.02 for a, b in zip(answer.logprobs, cold.logprobs, strict=True))
    return answer.tokens == cold.tokens and close


async def grown(answer: Answer, num_tokens: int) -> None:
    while len(answer.tokens) < num_tokens:
        await asyncio.sleep(0.001)


async def through_a_commit(engine: Engine, name: str, version: int, *, preempt: bool = False) -> Answer:
    """A request of LENGTH tokens that is under way while `version` becomes live; vLLM may preempt it behind that."""
    await stage(engine, version)
    answer = Answer()
    request = asyncio.create_task(engine.ask(name, PROMPT, LENGTH, into=answer))
    await grown(answer, 5)
    await engine.core("feed_commit", version)
    if preempt:
        await engine.llm.reset_prefix_cache(reset_running_requests=True)
    return await request


def test_a_prefix_of_another_version_is_never_hit(engine: Engine) -> None:
    async def run() -> None:
        await commit(engine, V1)
        first = await engine.ask("s1", PROMPT, 4)
        again = await engine.ask("s2", PROMPT, 4)
        assert (first.cached, again.cached) == (0, HIT), "within a version the cache works"
        assert again.kv == [(str(V1), 0, len(PROMPT) + 3)]
        await commit(engine, V2)
        after = await engine.ask("s3", PROMPT, 4)
        assert after.cached == 0 and after.kv == [(str(V2), 0, len(PROMPT) + 3)]
        assert same(after, await engine.ask("s4", PROMPT, 4, cold=True))

    engine.run(run())


def test_keep_hits_old_prefixes_and_says_so(engine: Engine) -> None:
    """vLLM's own way: the answer is another one than the live weights give. The detector of the test above."""

    async def run() -> None:
        await engine.core("megastream_kv", "keep")
        await commit(engine, V1)
        await engine.ask("k1", PROMPT, 2)
        await commit(engine, V2)
        stale = await engine.ask("k2", PROMPT, 4)
        assert stale.cached == HIT
        assert stale.kv == [(str(V1), 0, HIT), (str(V2), HIT, len(PROMPT) + 3)]
        assert not same(stale, await engine.ask("k3", PROMPT, 4, cold=True))

    engine.run(run())


def test_a_commit_between_asking_and_the_first_step(engine: Engine) -> None:
    """Eight requests fill the engine, the ninth waits: a salt that it was given when it was added would be old."""

    async def run() -> None:
        await commit(engine, V1)
        await engine.ask("w0", PROMPT, 1)  # there to be hit wrongly
        await stage(engine, V2)
        growing = Answer()
        long = [asyncio.create_task(engine.ask(f"w-long-{n}", [20 + n] * 4, 200)) for n in range(7)]
        long.append(asyncio.create_task(engine.ask("w-long-7", [27] * 4, 200, into=growing)))
        await grown(growing, 5)
        waiting = asyncio.create_task(engine.ask("w1", PROMPT, 4))
        await grown(growing, 10)
        await engine.core("feed_commit", V2)
        answer = await waiting
        assert all({label for label, _, _ in a.kv} == {str(V1), str(V2)} for a in await asyncio.gather(*long))
        assert answer.kv == [(str(V2), 0, len(PROMPT) + 3)] and answer.cached == 0
        assert same(answer, await engine.ask("w2", PROMPT, 4, cold=True))
        warm = await engine.ask("w3", PROMPT, 4)
        assert warm.cached == HIT and same(warm, answer), "what it computed is hit by who comes after it"

    engine.run(run())


def test_a_running_request_keeps_its_keys_and_values(engine: Engine) -> None:
    async def run() -> None:
        await commit(engine, V1)
        answer = await through_a_commit(engine, "r1", V2)
        (first, _, border), (second, begin, end) = answer.kv
        assert (first, second, begin, end) == (str(V1), str(V2), border, len(PROMPT) + LENGTH - 1)
        # The token that a version's first step sampled stands one position behind the first that it computed.
        assert [start for label, start, _ in answer.spans if label == str(V2)] == [border + 1 - len(PROMPT)]

    engine.run(run())


NO_RECOMPUTE = compat.version() < (0, 32, 0)


@pytest.mark.skipif(not NO_RECOMPUTE, reason="vLLM 0.32 can")
def test_recompute_is_refused_by_a_vllm_that_cannot(engine: Engine) -> None:
    with pytest.raises(Exception, match="loses the order of tokens under way"):
        engine.run(engine.core("megastream_kv", "recompute"))


@pytest.mark.parametrize(
    "how", [pytest.param("recompute", marks=pytest.mark.skipif(NO_RECOMPUTE, reason="refused")), "preemption"]
)
def test_a_request_that_starts_again_attends_to_one_version_only(engine: Engine, how: str) -> None:
    """Recompute preempts all at the commit; in the other case vLLM preempts, later, for reasons of its own."""

    async def run() -> None:
        await commit(engine, V1)
        if how == "recompute":
            await engine.core("megastream_kv", "recompute")
        answer = await through_a_commit(engine, "p1", V3, preempt=how == "preemption")
        assert answer.kv == [(str(V3), 0, len(PROMPT) + LENGTH - 1)] and len(answer.tokens) == LENGTH
        begin = next(start for label, start, _ in answer.spans if label == str(V3)) + 4
        rest = await engine.ask("p2", PROMPT + answer.tokens[:begin], LENGTH - begin, cold=True)
        close = [abs(a - b) < 0.02 for a, b in zip(answer.logprobs[begin:], rest.logprobs, strict=True)]
        assert answer.tokens[begin:] == rest.tokens and all(close)

    engine.run(run())


def test_evict_gives_old_prefixes_up(engine: Engine) -> None:
    async def run() -> None:
        await commit(engine, V1)
        await engine.ask("e1", PROMPT, 2)
        await commit(engine, V2)
        assert await engine.core("feed_cached_blocks") > 0, "salt leaves them to vLLM's own eviction"
        await engine.core("megastream_kv", "evict")
        await commit(engine, V1)
        assert await engine.core("feed_cached_blocks") == 0
        assert (await engine.ask("e2", PROMPT, 2)).cached == 0
        assert (await engine.ask("e3", PROMPT, 2)).cached == HIT

    engine.run(run())


def test_an_unknown_policy_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(Exception, match=r"megastream.kv is 'drop'; choose one of keep, salt, evict, recompute"):
        engine.run(engine.core("megastream_kv", "drop"))


# -- the book alone ----------------------------------------------------------------------------------------------------


def part(name: str, start: int, end: int, *, prompt: int | None = None, anew: bool = False) -> Scheduled:
    return Scheduled(name, start, end, 4, prompt, anew)


def kv(book: KvBook, name: str, num_tokens: int) -> list[tuple[str | None, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in book.carried(name, num_tokens)["kv_versions"]]


def test_blocks_remember_who_computed_them() -> None:
    book = KvBook("keep")
    blocks = {"a": [7, 8], "b": [7, 8, 9], "c": [7, 9]}
    book.scheduled("1", [part("a", 0, 6, prompt=8, anew=True)], blocks.__getitem__)
    book.scheduled("2", [part("a", 6, 8)], blocks.__getitem__)
    book.scheduled("3", [part("b", 8, 9, prompt=9, anew=True)], blocks.__getitem__)
    assert kv(book, "b", 1) == [("1", 0, 6), ("2", 6, 8), ("3", 8, 9)]
    book.scheduled("4", [part("c", 4, 5, prompt=5, anew=True)], blocks.__getitem__)  # block 9 goes to another request
    assert kv(book, "c", 1) == [("1", 0, 4), ("4", 4, 5)]
    book.choose("keep")
    book.scheduled("5", [part("d", 4, 5, prompt=5, anew=True)], {"d": [7, 8]}.__getitem__)
    assert kv(book, "d", 1) == [(None, 0, 4), ("5", 4, 5)], "cached before the policy was chosen"


def test_rejected_drafts_and_steps_ahead_do_not_count() -> None:
    book = KvBook("salt")
    book.scheduled("1", [part("a", 0, 3, prompt=3, anew=True)], {}.__getitem__)
    book.scheduled("1", [part("a", 3, 7)], {}.__getitem__)  # three drafts, of which one was taken
    book.scheduled("2", [part("a", 5, 6)], {}.__getitem__)
    book.scheduled("2", [part("a", 6, 7)], {}.__getitem__)  # scheduled ahead of the last token's output
    assert kv(book, "a", 4) == [("1", 0, 5), ("2", 5, 6)]
    book.forget("a")
    assert kv(book, "a", 0) == []
