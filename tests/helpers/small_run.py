"""A quickstart that is small enough for a test: the same command, the same parts, a smaller model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from megastream.rl.children import before_program

ROOT = Path(__file__).parents[2]
DEADLINE_S = 200.0

SMALL = {
    "seed": 7,
    "model": {
        "layers": 4,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "experts": 8,
        "top_k": 2,
        "expert_ffn": 64,
    },
    "data": {"task": "chain_sum", "train": 400, "held_out": 16, "seq_length": 32},
    "trainer": {
        "ranks": 4,
        "tp": 1,
        "pp": 2,
        "ep": 2,
        "micro_batch": 2,
        "num_micro_batches": 2,
        "learning_rate": 2e-3,
        "clip_grad": 1.0,
        "bucket_elements": 50_000,
    },
    "engine": {"layout": "pp2", "streams": 2, "answer_tokens": 32, "max_model_len": 256, "kv_cache_mib": 128},
    "stream": {"finality": "pipelined", "piece_mib": 0.25, "experts_per_unit": 4, "slots_per_target": 4},
    "run": {"updates": 4, "checked_updates": 3, "checked_tokens": 300, "modes": ["stock", "stream", "whole"]},
    "deadlines": {"start_s": 200, "attach_s": 100, "step_s": 100, "reconnect_s": 20, "stop_s": 15},
}


def write_config(folder: Path, **changes: object) -> Path:
    """The small configuration with `section__key=value` changes, as a file in `folder`."""
    raw = {name: dict(value) if isinstance(value, dict) else value for name, value in SMALL.items()}
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            raw[section][key] = value  # type: ignore[index]
        else:
            raw[section] = value
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def start(config: Path, out: Path, *arguments: str, command: str = "quickstart") -> subprocess.Popen[str]:
    """The command in its own process; standard error is its last word. It ends with the test's process.

    Ctrl-C reaches it also where the tests themselves run in the background of a shell, which ignores that signal there.
    """
    end_with_us = before_program(os.getpid(), nice=0)

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        end_with_us()

    return subprocess.Popen(
        [sys.executable, "-m", "megastream.cli.main", command, str(config), "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=prepare,
    )


def wait_for(what: str, condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Polls until the condition holds; AssertionError says what did not come."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.05)
