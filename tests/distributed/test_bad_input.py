"""Bad input to the command: one line that names the thing and the remedy, a status above 0, nothing half done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megastream.rl import owned
from tests.helpers.small_run import start, write_config


def refusal(tmp_path: Path, *arguments: str, status: int = 1, **changes: object) -> str:
    """The one line on standard error of a run that must not start; `status` 2 when its file alone shows why."""
    run = start(write_config(tmp_path, **changes), tmp_path / "out", *arguments)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == status
    assert not (tmp_path / "out" / owned.OWNER_FILE).exists()
    assert not (tmp_path / "out" / "summary.json").exists()
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    return lines[0]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"engine__layuot": "pp2"}, 2, ("unknown key engine.layuot", "engine.layout")),
        ({"model__experts": 9}, 2, ("model.experts is 9", "trainer.ep = 2")),
        ({"data__task": "chain_sums"}, 1, ("chain_sums", "reasoning-gym")),
        ({"data__seq_length": 100_000}, 1, ("data.seq_length = 100000", "data.train")),
    ],
)
def test_configuration(tmp_path: Path, changes: dict[str, object], status: int, words: tuple[str, ...]) -> None:
    line = refusal(tmp_path, status=status, **changes)
    for word in words:
        assert word in line


def test_engine_layout_option(tmp_path: Path) -> None:
    line = refusal(tmp_path, "--engine-layout", "pp9", status=2)
    assert "--engine-layout is 'pp9'; it is one of pp2, tp2ep" in line


def test_control_plane_that_is_away(tmp_path: Path) -> None:
    line = refusal(tmp_path, "--redis-url", f"unix://{tmp_path}/nobody.sock")
    assert "nobody.sock" in line and "cannot connect" in line


def test_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    started = owned.start_time(os.getpid())
    assert started is not None
    owned.Owner("other", os.getpid(), started, str(tmp_path / "absent"), place=owned.this_place()).write(
        tmp_path / "out"
    )
    run = start(write_config(tmp_path), tmp_path / "out")
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 1
    assert f"in use by the run of process {os.getpid()}" in stderr and "--out" in stderr
    assert (tmp_path / "out" / owned.OWNER_FILE).exists()
