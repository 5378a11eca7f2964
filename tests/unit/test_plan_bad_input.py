"""`megastream plan` with a config.json or layouts that cannot be: one line at once, never a traceback."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megastream.cli.main import app

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 32,
}
LONGEST_S = 10.0


def refused(tmp_path: Path, content: Any, *options: str, trainer: str = "pp2 ep2", engine: str = "pp2") -> str:
    """The line with which the command refuses."""
    path = tmp_path / "model.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    begin = time.monotonic()
    command = ["plan", "--model", str(path), "--trainer", trainer, "--engine", engine, *options]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, SystemExit) and done.exit_code == 2, done.exception or done.output
    assert len(done.output.splitlines()) == 1
    assert time.monotonic() - begin < LONGEST_S
    return done.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({key: 0}, f"{key} is 0") for key in CONFIG if key.startswith(("num_a", "num_k", "num_h", "head", "vocab"))),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and num_experts is 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000; it is at most 131072"),
        ({"num_experts": 100_000}, "num_experts is 100000"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100000"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers has 4; the model has layers 0 to 3"),
        ({"mlp_only_layers": [None]}, "mlp_only_layers has None"),
    ],
)
def test_sizes_that_cannot_be(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refused(tmp_path, {**CONFIG, **changes})


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        ({"trainer": "tp8"}, "4 attention heads do not divide by tp=8"),
        ({"trainer": "tp3"}, "4 attention heads do not divide by tp=3"),
        ({"engine": "pp5"}, "5 stages for 4 layers"),
        ({"trainer": "pp8"}, "8 stages for 4 layers"),
        ({"engine": "tp4 dp4 ep16"}, "8 experts for ep=16 ranks; each needs one"),
        ({"trainer": "ep16"}, "8 experts do not divide by ep=16"),
        ({"trainer": "tp٣"}, "cannot read 'tp٣'"),
        ({"trainer": "tp²"}, "cannot read"),
        ({"trainer": "pp" + "9" * 5000}, "cannot read"),
        ({"trainer": "dp99999"}, "smaller dp"),
        ({"engine": "tp999999"}, "do not divide by tp=999999"),
    ],
)
def test_layouts_that_cannot_be(tmp_path: Path, sides: dict[str, str], words: str) -> None:
    assert words in refused(tmp_path, CONFIG, **sides)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--piece-bytes", "9" * 23, "at most 1073741824"),
        ("--experts-per-unit", "9" * 23, "at most 4096"),
        ("--piece-bytes", "2", "take larger messages"),
    ],
)
def test_options_beyond_their_bounds(tmp_path: Path, option: str, value: str, words: str) -> None:
    assert words in refused(tmp_path, {**CONFIG, "hidden_size": 4096, "vocab_size": 2000}, option, value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b'{"vocab_size": ' + b"9" * 5000 + b"}"])
def test_files_that_are_no_json_are_named(tmp_path: Path, content: bytes) -> None:
    assert str(tmp_path / "model.json") in refused(tmp_path, content)
