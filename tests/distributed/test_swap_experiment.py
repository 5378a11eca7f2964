"""`megastream swap` as a person starts it, on a tiny model: an engine, its requests, every case, three files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megastream.rl.plain import read_plain
from tests.helpers.small_run import start
from tests.helpers.tiny_moe import TinyMoe, random_weights, write_checkpoint

RUN_S = 400.0
pytestmark = [pytest.mark.full, pytest.mark.timeout(RUN_S + 20)]
FILE = Path(__file__).parents[2] / "configs/swap.yaml"
CHANGES: dict[str, dict[str, Any]] = {
    "engine": {"idle_uses": 1e6, "early_units": 2},  # whatever is used counts as cold
    "swap": {"experts": [4], "swaps": 4, "tokens_between": 30, "emission_s": 0.3},
}
TRAFFIC = {"requests": [2], "skew": [1.0], "prompts": 4, "prompt_tokens": 8, "answer_tokens": 24}
PROMPTS = ["3 + 4", [72, 101, 108]]
RECORDED = [{"at_s": number, "prompt": PROMPTS[number % 2], "answer_tokens": 60} for number in range(80)]
"""Eight seconds at speed 10, and 4,800 tokens: swaps take their time on a busy machine, and requests come meanwhile."""


@pytest.mark.parametrize("requests", ["live", "replayed"])
def test_every_case_is_run_and_its_figures_are_possible(requests: str, tmp_path: Path) -> None:
    config = read_plain(FILE)
    for section, values in CHANGES.items():
        config[section] |= values
    if requests == "live":
        config["traffic"] = TRAFFIC
    else:
        del config["traffic"]
        config["replay"] = {"file": str(tmp_path / "requests.jsonl"), "speed": [10.0]}
        (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in RECORDED))
    for seed, name in enumerate(("model", "other")):
        config[name] = str(write_checkpoint(tmp_path / name, TinyMoe(), random_weights(TinyMoe(), seed)))
    (tmp_path / "swap.yaml").write_text(yaml.safe_dump(config))
    run = start(tmp_path / "swap.yaml", tmp_path / "out", command="swap")
    try:
        stdout, stderr = run.communicate(timeout=RUN_S)
    finally:
        run.kill()  # its guard ends the rest
    assert run.returncode == 0, stderr
    assert stdout.count("longest gap") == 3 and "results: " in stdout
    none, strict, idle = json.loads((tmp_path / "out/swap.json").read_text())["cases"]
    assert [row["gate"] for row in (none, strict, idle)] == ["none", "version", "idle_experts"]
    assert none["swaps"] == 0 and strict["swaps"] == idle["swaps"] == 4
    assert strict["early_bytes_share"] == strict["mixed_token_share"] == 0 and strict["calls_per_swap"] == 1
    assert 0 < idle["early_bytes_share"] < 1 and 0 < idle["mixed_token_share"] < 1 and idle["calls_per_swap"] > 1
    assert idle["version_bytes"] == strict["version_bytes"] == 4 * 4 * 3 * 64 * 32 * 2
    assert none["drift_mean"] < strict["drift_mean"], "KV of older versions"
    assert idle["mixed_drift_mean"] > none["drift_mean"]
    asked = [(row["requests"], row["skew"], row["speed"]) for row in (none, strict, idle)]
    assert asked == [(2, 1.0, None) if requests == "live" else (None, None, 10.0)] * 3
    if requests == "live":
        assert all(row["tokens"] >= 5 * 30 and 1 < row["in_flight"] <= 2 for row in (none, strict, idle))
    else:
        assert [row["tokens"] for row in (none, strict, idle)] == [80 * 60] * 3
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "cases.jsonl", "job.json", "swap.csv", "swap.html", "swap.json", "swap.log",
    }  # fmt: skip


class FakeEngine:
    """Answers at once, with an answer's first token only when it is `short`."""

    def __init__(self, short: bool = False) -> None:
        self.short, self.asked = short, list[str]()

    async def generate(self, prompt: Any, sampling: Any, request: str) -> AsyncIterator[Any]:
        self.asked.append(request)
        await asyncio.sleep(0)
        tokens = list(range(1 if self.short else sampling.max_tokens))
        part = SimpleNamespace(token_ids=tokens, logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in tokens])
        spans = [{"version": "0", "start": 0, "end": len(tokens)}]
        yield SimpleNamespace(
            outputs=[part], kv_transfer_params={"weight_versions": spans}, prompt_token_ids=prompt["prompt_token_ids"]
        )


def replayed(engine: FakeEngine, tokens: int) -> list[Any]:
    """Two requests, the first line's a tenth of a second after the second's; `tokens` are waited for."""
    from megastream.rl.swap_replay import Arrival
    from megastream.rl.swap_traffic import Traffic

    arrivals = [Arrival(at_s=at_s, prompt=(7, 8), answer_tokens=3) for at_s in (1000.0, 0.0)]

    async def run() -> list[Any]:
        traffic = Traffic(engine, 0, "t")  # type: ignore[arg-type]
        traffic.replay(arrivals, speed=10_000.0)
        await traffic.wait_for(tokens, 30)
        await traffic.stop()
        return traffic.answers

    return asyncio.run(run())


def test_a_replay_keeps_the_order_of_times_and_ends_with_an_error_when_it_was_too_short() -> None:
    engine = FakeEngine()
    answers = replayed(engine, 3)
    assert engine.asked == ["t-1", "t-0"] and [len(answer.tokens) for answer in answers] == [3, 3]
    with pytest.raises(ValueError, match="the last request was answered 1 tokens before the next swap was due"):
        replayed(FakeEngine(), 7)
    with pytest.raises(ValueError, match="request t-1 was answered with 1 tokens of 3; engine.max_model_len"):
        replayed(FakeEngine(short=True), 3)
