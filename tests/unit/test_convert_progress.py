"""The progress bar: on a terminal, up to all bytes; nowhere else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.convert_models import write_hf

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


def told(command: list[str], *, terminal: bool) -> str:
    """What a command writes to its stderr, without colours and moves of the cursor."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-m", "megastream.cli.main", *command],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=writer,
        env=environment,
    )
    os.close(writer)
    said = b""
    try:
        while part := _read(reader):
            said += part
        assert process.wait(60) == 0, said
    finally:
        process.kill()
        os.close(reader)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode())


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 4096)
    except OSError:  # a terminal ends so
        return b""


@pytest.mark.timeout(120)
def test_a_bar_on_a_terminal_and_nothing_elsewhere(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "one")
    bar = told(["convert", str(source), str(tmp_path / "two")], terminal=True)
    whole = r"(\d+(?:\.\d+)?)/\1 [kM]?B"
    assert re.search(rf"one to hf .*{whole}", bar), bar
    assert re.search(rf"one and two .*{whole}", told(["verify", *map(str, (source, tmp_path / "two"))], terminal=True))
    assert told(["convert", str(source), str(tmp_path / "three")], terminal=False) == ""
