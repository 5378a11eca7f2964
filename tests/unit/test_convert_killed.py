"""A conversion that is killed at any moment leaves the old target or none, and goes on where it was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megastream.convert import landing
from megastream.convert.forms import Options
from megastream.convert.run import convert
from megastream.convert.safetensors_file import read_header
from megastream.convert.types import ConvertError
from tests.helpers.convert_models import converted, difference, write_hf

ROOT = Path(__file__).parents[2]
SLOW = """
import sys, time
from pathlib import Path
from megastream.convert import execute, run
from megastream.convert.forms import Options

run._BATCH_BYTES = 30_000
real = execute._write_all

def write_all(descriptor, data, start):  # so slow that a kill falls into the middle of something
    half = len(data) // 2
    real(descriptor, data[:half], start)
    time.sleep(0.002)
    real(descriptor, data[half:], start + half)

execute._write_all = write_all
source, target, to, layout, dtype, resume = sys.argv[1:]
options = Options(to=to, to_layout=layout or None, dtype=dtype or None, max_file_bytes=60_000)
run.convert(
    Path(source),
    Path(target),
    options,
    lambda done, total: print(done, flush=True),
    overwrite=True,
    resume=bool(resume),
)
"""


def kill_and_resume(source: Path, target: Path, to: str, layout: str, dtype: str, kills: int) -> int:
    """Starts, kills, resumes; returns how many kills fell into a run."""
    numbers, resume, killed = random.Random(7), "", 0
    weights = target / "model.safetensors"
    old = weights.read_bytes()
    for turn in range(kills + 1):
        command = [sys.executable, "-c", SLOW, str(source), str(target), to, layout, dtype, resume]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None and process.stderr is not None
            begun = process.stdout.readline()
            assert begun, process.stderr.read()
            if turn < kills:
                time.sleep(numbers.random() * 0.3)
                os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=120)
        if process.returncode == 0:
            break
        if (target.with_name(f".{target.name}.converting") / "journal").exists():
            killed, resume = killed + 1, "yes"
        else:  # right before the new files got their name, or behind it; there is nothing to resume
            resume = ""
            unchanged = weights.is_file() and weights.read_bytes() == old
            assert unchanged or difference(source, target) is None
    return killed


CASES = [
    ("hf", "", "", 1),
    pytest.param("hf", "", "", 12, marks=pytest.mark.full),
    pytest.param("hf", "", "fp8-block128", 12, marks=pytest.mark.full),
    pytest.param("torch_dist", "", "", 8, marks=pytest.mark.full),
    pytest.param("mp_rank", "tp2 etp1 ep2 pp2", "", 8, marks=pytest.mark.full),
    pytest.param("sharded_state", "tp2 ep2 pp2", "", 8, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("to", "layout", "dtype", "kills"), CASES)
def test_killed_at_random_moments(tmp_path: Path, to: str, layout: str, dtype: str, kills: int) -> None:
    source, target = write_hf(tmp_path / "a"), tmp_path / "b"
    old = write_hf(target, layers=2, experts=4)
    before = (old / "model.safetensors").read_bytes()
    killed = kill_and_resume(source, target, to, layout, dtype, kills)
    assert killed >= 1, "no kill fell into a conversion"
    assert difference(source, target) is None
    assert before and sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def rewrite(source: Path, target: Path, resume: bool = False) -> None:
    convert(source, target, Options(to="hf"), lambda done, total: None, overwrite=True, resume=resume)


@pytest.mark.parametrize("swaps", [True, False])
def test_killed_right_after_the_new_files_got_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    source, target = write_hf(tmp_path / "a"), tmp_path / "b"
    if swaps:
        write_hf(target, layers=2, experts=4)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(landing.shutil, "rmtree", lambda path, **_: killed() if path.name == ".b.converting" else None)
        rewrite(source, target)
    with pytest.raises(ConvertError, match="nothing of .* to resume; leave --resume out"):
        rewrite(source, target, resume=True)
    assert difference(source, target) is None
    rewrite(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_killed_right_before_the_new_files_got_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is gone, so it begins anew; what was there is there still."""
    source, target = write_hf(tmp_path / "a"), write_hf(tmp_path / "b", layers=2, experts=4)
    before = (target / "model.safetensors").read_bytes()
    real = landing._sync

    def killed(path: Path) -> None:
        if path.name == ".b.converting":
            raise KeyboardInterrupt
        real(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(landing, "_sync", killed)
        rewrite(source, target)
    assert (target / "model.safetensors").read_bytes() == before
    with pytest.raises(ConvertError, match="nothing of .* to resume; leave --resume out"):
        rewrite(source, target, resume=True)
    rewrite(source, target)
    assert difference(source, target) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_what_was_there_stays_while_it_is_written(tmp_path: Path) -> None:
    source, target = write_hf(tmp_path / "a"), write_hf(tmp_path / "b", layers=2, experts=4)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    command = [sys.executable, "-c", SLOW, str(source), str(target), "hf", "", "", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert read_header(target / "model.safetensors")
    assert difference(converted(source, target / ".." / "c"), source) is None
