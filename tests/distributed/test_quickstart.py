"""The whole thing, small: real Megatron trains, real vLLM generates, both ways of updating, and every figure holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.small_run import DEADLINE_S, start, write_config

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


@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2ep", marks=pytest.mark.full)])
def test_small_quickstart(tmp_path: Path, layout: str) -> None:
    out = tmp_path / "out"
    run = start(write_config(tmp_path, engine__layout=layout), out)
    stdout, stderr = run.communicate(timeout=DEADLINE_S)
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
    assert not (out / "owner.json").exists()
