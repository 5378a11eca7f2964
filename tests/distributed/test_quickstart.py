"""The whole thing, small: real Megatron trains, real vLLM generates, both ways of updating, and every figure holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastream.rl.fixed import NUM_PROMPTS, NUM_TOKENS
from megastream.rl.job import read_lines
from tests.helpers.fresh_engine import fresh_answers
from tests.helpers.small_run import start, write_config

FIGURES = {
    "updates",
    "units",
    "bytes",
    "bytes_floor",
    "bytes_wasted",
    "tensors_checked",
    "tensors_differing",
    "tokens_checked",
    "mixed_tokens",
    "mislabelled_tokens",
    "update_stall_ms",
    "repair_ms",
    "longest_gap_ms",
    "longest_gap_without_updates_ms",
    "median_step_ms",
    "update_to_visible_ms",
    "tokens_per_s",
    "train_step_ms",
    "loss_first",
    "loss_last",
}

RUN_S, FRESH_S = 280.0, 180.0
"""For the run and for the fresh engine after it. Both take a minute on two idle cores, and more on busy ones."""


@pytest.mark.timeout(RUN_S + FRESH_S + 20)
@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2ep", marks=pytest.mark.full)])
def test_small_quickstart(tmp_path: Path, layout: str) -> None:
    out = tmp_path / "out"
    run = start(write_config(tmp_path, engine__layout=layout), out)
    try:
        stdout, stderr = run.communicate(timeout=RUN_S)
    finally:
        run.kill()  # its guard ends the rest
    assert run.returncode == 0, stderr
    assert "what it took" in stdout
    summary = json.loads((out / "summary.json").read_text())
    assert {"trainer", "engine", "stream", "whole", "libraries"} <= summary.keys()
    assert {"layout", "ranks", "steps", "params", "hf_tensors"} <= summary["trainer"].keys()
    for mode in ("stream", "whole"):
        figures = summary[mode]
        assert figures.keys() >= FIGURES
        assert figures["updates"] == 4 and figures["tensors_differing"] == 0
        assert figures["tensors_checked"] == 3 * summary["engine"]["tensors"] > 0
        assert figures["tokens_checked"] >= 300
        assert figures["mixed_tokens"] == figures["mislabelled_tokens"] == 0
        assert figures["bytes_wasted"] == 0
    stream = summary["stream"]
    assert 1.0 <= stream["bytes"] / stream["bytes_floor"] <= 1.02
    lines = [json.loads(line) for line in (out / "versions.jsonl").read_text().splitlines()]
    streamed = [line for line in lines if line["pass"] == "stream"]
    assert all(line["payload_bytes"] == stream["bytes_floor"] for line in streamed)
    whole = [line for line in lines if line["pass"] == "whole"]
    assert whole and all(line["stall_ms"] > 0 for line in whole if line["train_step"] > 0)
    assert not (out / "owner.json").exists()
    check_fresh_engine(out)


@pytest.mark.full
@pytest.mark.timeout(RUN_S + 20)
@pytest.mark.parametrize(
    ("finality", "ownership", "clip", "words"),
    [("speculative", "replica", 1.0, "undone, made again and sent again"), ("early", "slice", 0.0, "no clipping")],
)
def test_weights_that_leave_inside_the_backward(
    tmp_path: Path, finality: str, ownership: str, clip: float, words: str
) -> None:
    """The command fails when a loss, a norm or a final parameter differs from the stock pass, or a live tensor does."""
    changes = {"stream__finality": finality, "stream__ownership": ownership, "trainer__clip_grad": clip}
    out = tmp_path / "out"
    run = start(write_config(tmp_path, **changes, run__modes=["stock", "stream"]), out)
    try:
        stdout, stderr = run.communicate(timeout=RUN_S)
    finally:
        run.kill()  # its guard ends the rest
    assert run.returncode == 0, stderr
    assert f"finality {finality}" in stdout and words in stdout and f"ownership {ownership}" in stdout
    stream = json.loads((out / "summary.json").read_text())["stream"]
    assert stream["updates"] == 4 and stream["tensors_differing"] == 0
    assert stream["mixed_tokens"] == stream["mislabelled_tokens"] == 0
    norms = [line["grad_norm"] for line in read_lines(out / "trainer-0.jsonl") if line["kind"] == "step"]
    assert (stream["bytes_wasted"] > 0) == any(0 < clip < norm for norm in norms)


def check_fresh_engine(out: Path) -> None:
    """A fresh engine on the exported checkpoint says the same as the trained one, to the last bit of each logprob."""
    asked = {line["name"]: line["answers"] for line in read_lines(out / "engine.jsonl") if line["kind"] == "fixed"}
    assert asked.keys() == {"stream-checked", "whole-checked"}
    fresh = fresh_answers(out, FRESH_S)
    assert len(fresh) == NUM_PROMPTS and all(len(answer["logprobs"]) == NUM_TOKENS for answer in fresh)
    assert asked["stream-checked"] == fresh
    assert asked["whole-checked"] == fresh
