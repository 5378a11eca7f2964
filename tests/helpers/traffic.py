"""Requests without a break, and updates in the middle of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from tests.helpers import reveal
from tests.helpers.engine import Answer, Engine

STREAMS = 7

Load = Callable[[Engine], AbstractAsyncContextManager[list[Answer]]]
"""Keeps requests in flight and gathers their answers, as `traffic` does."""


@asynccontextmanager
async def traffic(engine: Engine) -> AsyncIterator[list[Answer]]:
    """Keeps `STREAMS` requests in flight, of many lengths, so that prefills and decodes overlap all the time.

    Yields the list that finished answers go to; on the way out the last ones are waited for.
    """
    answers: list[Answer] = []
    done = asyncio.Event()

    async def stream(index: int) -> None:
        for number in itertools.count():
            if done.is_set():
                return
            prompt = [20] * (3 + (37 * number + 11 * index) % 150)
            answers.append(await engine.ask(f"t{index}-{number}", prompt, 20 + (13 * number + 7 * index) % 60))

    tasks = [asyncio.create_task(stream(index)) for index in range(STREAMS)]
    try:
        yield answers
    finally:
        done.set()
        await asyncio.gather(*tasks)


@contextmanager
def requests(engine: Engine, load: Load = traffic) -> Iterator[list[Answer]]:
    """As `load`, for a test that is not in the engine's event loop. The list has all answers behind the block."""
    answers: list[Answer] = []
    ended = threading.Event()

    async def run() -> None:
        async with load(engine) as found:
            while not ended.is_set():
                await asyncio.sleep(0.005)
        answers.extend(found)

    running = asyncio.run_coroutine_threadsafe(run(), engine.loop)
    try:
        yield answers
    finally:
        ended.set()
        running.result(120)


async def stage(engine: Engine, version: int) -> None:
    """Brings a version to every rank, ready for a commit."""
    await engine.ranks("feed_stage", version)
    while not all(await engine.ranks("feed_staged")):
        await asyncio.sleep(0.01)


async def commit(engine: Engine, version: int) -> None:
    """The right way: staged, then one ordered commit."""
    await stage(engine, version)
    replies = await engine.core("feed_commit", version)
    assert [reply["ok"] for reply in replies] == [True] * len(replies), replies


async def update_often(
    engine: Engine,
    first: int,
    updates: int,
    tokens: int,
    update: Callable[[int], Awaitable[None]],
    load: Load = traffic,
) -> list[Answer]:
    """Runs `update(version)` for versions from `first` on, spread over `tokens` tokens. All answers."""
    async with load(engine) as answers:
        start = engine.num_tokens
        for number in range(updates):
            while engine.num_tokens - start < tokens * number // updates:
                await asyncio.sleep(0.002)
            await update(first + number)
        while engine.num_tokens - start < tokens:
            await asyncio.sleep(0.002)
    return answers


def count(answers: list[Answer]) -> dict[str, int]:
    """Tokens, those that met more than one version, those whose label is another version's."""
    pairs = [pair for a in answers for pair in zip(a.tokens, a.labels(), strict=True)]
    return {
        "tokens": len(pairs),
        "mixed": sum(reveal.is_mixed(token) for token, _ in pairs),
        "mislabelled": sum(reveal.is_mislabelled(token, label) for token, label in pairs),
    }


async def differing(engine: Engine, version: int) -> list[str]:
    """Names of live buffers that are not those of `version`, over all ranks; all must have been looked at."""
    expected = await engine.ranks("feed_expected", version)
    live = await engine.ranks("megastream_call", "digest", {})
    assert all(reply["ok"] for reply in live), live
    out = []
    for want, reply in zip(expected, live, strict=True):
        assert want.keys() == reply["digests"].keys()
        out += [name for name, digest in want.items() if reply["digests"][name] != digest]
    return out
