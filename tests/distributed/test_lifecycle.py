"""Nothing is left behind, whichever process of a run is killed, and after Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastream.rl import owned
from megastream.rl.job import read_lines
from tests.helpers.small_run import start, wait_for, write_config

END_S = 60.0
"""From the kill until the last process of the run is gone."""

KINDS = {
    "trainer rank": "megastream.rl.train",
    "engine core": "VLLM::EngineCore",
    "worker": "VLLM::Worker",
    "redis": "valkey-server",
    "host": "megastream.rl.host",
}


def owner(out: Path) -> owned.Owner:
    found = owned.Owner.read(out)
    assert found is not None
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def process_of(run_id: str, word: str) -> int:
    found = [pid for pid in owned.processes(run_id) if word in command_line(pid)]
    assert found, f"no {word} among {[command_line(pid) for pid in owned.processes(run_id)]}"
    return found[0]


def streaming(out: Path) -> bool:
    """The first version was streamed and is live: every process of the run is there and at work."""
    return any(line["train_step"] > 0 for line in read_lines(out / "versions.jsonl"))


@pytest.fixture(autouse=True)
def no_semaphores_left() -> Iterator[None]:
    """Their names are random, so all that are there afterwards and were not before count as the run's."""
    before = set(owned.SHM.glob("sem.mp-*"))
    yield
    wait_for("the run's semaphores to go", lambda: set(owned.SHM.glob("sem.mp-*")) <= before, END_S)


def nothing_left(left: owned.Owner, segments: set[str]) -> bool:
    remains = [name for name in segments if (owned.SHM / name).exists()]
    return not owned.processes(left.run_id) and not remains and not Path(left.folder).exists()


def run_until_streaming(tmp_path: Path, layout: str) -> tuple[subprocess.Popen[str], owned.Owner, set[str]]:
    """A run that goes on for long, at work; its owner and the segments that its processes use."""
    out = tmp_path / "out"
    run = start(write_config(tmp_path, engine__layout=layout, run__updates=2000, run__modes=["stream"]), out)
    try:
        wait_for("the first streamed version", lambda: streaming(out) or run.poll() is not None)
        assert run.poll() is None, run.communicate()[1]
        found = owner(out)
        found.note_segments()
        return run, found, set(found.segments)
    except BaseException:
        run.kill()
        run.communicate()
        raise


def end(run: subprocess.Popen[str], found: owned.Owner) -> None:
    """After a failed test: nothing may stay on this machine."""
    if run.poll() is None:
        run.kill()
    run.communicate()
    owned.kill_all(found.run_id)


EVERY = [(kind, layout) for layout in ("pp2", "tp2ep") for kind in (*KINDS, "launcher", "launcher and guard")]
DEFAULT = {("worker", "tp2ep")}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.full) for case in EVERY],
)
def test_kill(tmp_path: Path, kind: str, layout: str) -> None:
    run, found, segments = run_until_streaming(tmp_path, layout)
    try:
        if kind.startswith("launcher"):
            guard = next(pid for pid in children_of(run.pid) if "megastream.rl.guard" in command_line(pid))
            if "guard" in kind:
                os.kill(guard, signal.SIGKILL)
            run.kill()
            run.communicate()
        else:
            os.kill(process_of(found.run_id, KINDS[kind]), signal.SIGKILL)
            _, stderr = run.communicate(timeout=END_S)
            assert run.returncode == 1
            assert len(stderr.strip().splitlines()) == 1, stderr
        if "guard" in kind:
            assert owned.Owner.read(tmp_path / "out") is not None
            owned.sweep(tmp_path / "out")
        wait_for("everything to end", lambda: nothing_left(found, segments), END_S)
        assert owned.Owner.read(tmp_path / "out") is None
    finally:
        end(run, found)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "tp2ep"])
def test_ctrl_c(tmp_path: Path, layout: str) -> None:
    run, found, segments = run_until_streaming(tmp_path, layout)
    try:
        run.send_signal(signal.SIGINT)
        _, stderr = run.communicate(timeout=END_S)
        assert run.returncode == 130
        assert stderr.strip() == "megastream: interrupted; everything was stopped"
        assert nothing_left(found, segments)
    finally:
        end(run, found)


def children_of(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in text.split()]
