"""The engine's load: an answer that the engine gives up is noted and asked again; a quiet engine is asked nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megastream.rl.data import Pair
from megastream.rl.job import LineLog, read_lines

answers = pytest.importorskip("megastream.rl.answers", reason="needs vLLM")


class Engine:
    """Answers with two tokens of version 3; the first `refusals` requests end as a poisoned engine ends them."""

    def __init__(self, refusals: int, reason: str = "error") -> None:
        self.refusals, self.reason, self.asked = refusals, reason, []

    async def generate(self, prompt: Any, sampling: Any, request: str) -> AsyncIterator[Any]:
        self.asked.append(request)
        if self.refusals:
            self.refusals -= 1
            yield output([], self.reason, None)
            return
        yield output([70], None, None)
        await asyncio.sleep(0.01)
        yield output([71], "length", {"weight_versions": [{"version": "3", "start": 0, "end": 2}]})


def output(tokens: list[int], reason: str | None, carried: dict[str, Any] | None) -> SimpleNamespace:
    completion = SimpleNamespace(token_ids=tokens, finish_reason=reason)
    return SimpleNamespace(outputs=[completion], finished=reason is not None, kv_transfer_params=carried)


def answering(engine: Engine, folder: Path) -> Any:
    lines, lost = LineLog(folder / "answers.jsonl"), LineLog(folder / "engine.jsonl")
    return answers.Answering(engine, [Pair("1+1", "2")], lines, lost, answer_tokens=2, seed=1)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_given_up_answers_are_noted_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(answers, "ASK_AGAIN_S", 0.01)

    async def run() -> Any:
        load = answering(Engine(2, reason), tmp_path)
        load.start(1)
        while not load.tokens_by_version:
            await asyncio.sleep(0.005)
        await load.stop()
        return load

    load = asyncio.run(asyncio.wait_for(run(), 20))
    lost = read_lines(tmp_path / "engine.jsonl")
    assert [(line["request"], line["reason"]) for line in lost] == [("q0.0", reason), ("q0.1", reason)]
    written = read_lines(tmp_path / "answers.jsonl")
    assert written[0]["request"] == "q0.2" and written[0]["spans"] == [["3", 0, 2]]
    assert written[0]["asked_unix_s"] <= written[0]["times"][0]
    assert load.tokens_by_version == {"3": 2 * len(written)}


def test_nothing_is_asked_while_quiet(tmp_path: Path) -> None:
    async def run() -> tuple[int, int, int]:
        engine = Engine(0)
        load = answering(engine, tmp_path)
        load.start(2)
        await asyncio.sleep(0.05)
        async with load.quiet(10):
            begun = len(engine.asked)
            await asyncio.sleep(0.1)
            ended = len(engine.asked)
        await asyncio.sleep(0.1)
        await load.stop()
        return begun, ended, len(engine.asked)

    begun, ended, later = asyncio.run(asyncio.wait_for(run(), 20))
    assert 0 < begun == ended < later
