"""A run's processes, segments and folders end with it, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from megastream.rl import owned

SLEEPER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


def start(run_id: str, code: str = SLEEPER) -> subprocess.Popen[bytes]:
    environment = {**os.environ, owned.MARK: run_id}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=True)


def wait_for(condition, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def owner_of(run_id: str, folder: Path, pid: int = 2**22 + 1) -> owned.Owner:
    return owned.Owner(run_id, pid, 0.0, str(folder))


def test_a_dead_runs_remains_are_swept(tmp_path: Path) -> None:
    run_id, ident = uuid.uuid4().hex, f"vllm_dist_{uuid.uuid4().hex}"
    folder = tmp_path / "temporary"
    folder.mkdir()
    (folder / ident).touch()
    ours, other = owned.SHM / f"{ident}-tp-[0-1]-cpushm", owned.SHM / f"test-other-{run_id}"
    ours.touch()
    other.touch()
    process, bystander = start(run_id), start(uuid.uuid4().hex)
    try:
        wait_for(lambda: len(owned.processes(run_id)) == 2)
        owner_of(run_id, folder).write(tmp_path)
        found = owned.sweep(tmp_path)
        assert len(found) == 4, found
        assert owned.processes(run_id) == [] and not ours.exists() and not folder.exists()
        assert other.exists() and bystander.poll() is None
        assert owned.sweep(tmp_path) == []
    finally:
        other.unlink()
        ours.unlink(missing_ok=True)
        for started in (process, bystander):
            owned.kill_all(run_id)
            os.killpg(started.pid, 9) if started.poll() is None else None
            started.wait()


def test_mapped_segments_are_noted_while_their_process_lives(tmp_path: Path) -> None:
    run_id = uuid.uuid4().hex
    segment = shared_memory.SharedMemory(create=True, size=4096)
    code = (
        "import mmap, os, time\n"
        f"fd = os.open('/dev/shm/{segment.name}', os.O_RDWR)\n"
        "held = mmap.mmap(fd, 4096)\ntime.sleep(60)"
    )
    process = start(run_id, code)
    try:
        owner = owner_of(run_id, tmp_path / "absent")
        wait_for(owner.note_segments)
        assert owner.segments == [segment.name]
        assert not owner.note_segments()
    finally:
        owned.kill_all(run_id)
        process.wait()
        segment.close()
        segment.unlink()


def test_a_live_run_is_not_touched(tmp_path: Path) -> None:
    started = owned.start_time(os.getpid())
    assert started is not None
    owned.Owner(uuid.uuid4().hex, os.getpid(), started, str(tmp_path)).write(tmp_path)
    with pytest.raises(ValueError, match=str(os.getpid())):
        owned.sweep(tmp_path)


def test_the_guard_ends_everything_when_its_launcher_is_gone(tmp_path: Path) -> None:
    run_id = uuid.uuid4().hex
    process = start(run_id)
    owner_of(run_id, tmp_path / "absent").write(tmp_path)
    guard = subprocess.Popen([sys.executable, "-m", "megastream.rl.guard", str(tmp_path)], stdin=subprocess.PIPE)
    wait_for(lambda: len(owned.processes(run_id)) == 2)
    assert guard.stdin is not None
    guard.stdin.close()
    assert guard.wait(20) == 0
    assert owned.processes(run_id) == []
    assert process.wait(5) == -9
