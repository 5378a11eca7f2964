"""A run's processes, segments and folders end with it, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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
    return owned.Owner(run_id, pid, 0.0, str(folder), place=owned.this_place())


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR of the run."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_dead_runs_remains_are_swept(tmp_path: Path) -> None:
    run_id, ident = uuid.uuid4().hex, f"vllm_dist_{uuid.uuid4().hex}"
    folder = owned.make_folder(run_id)
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
    owned.Owner(uuid.uuid4().hex, os.getpid(), started, str(tmp_path), place=owned.this_place()).write(tmp_path)
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


def test_a_folder_that_no_run_made_is_refused_and_kept(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = uuid.uuid4().hex
    elsewhere, unmarked, other = tmp_path / "megastream-x", temporary / "megastream-x", temporary / "mine"
    marked, of_another_run = owned.make_folder(run_id), owned.make_folder(uuid.uuid4().hex)
    link = temporary / "megastream-link"
    link.symlink_to(marked)
    for folder in (elsewhere, unmarked, other):
        folder.mkdir()
        if folder != unmarked:
            (folder / owned.MARKER_FILE).write_text(run_id)
    for folder in (elsewhere, unmarked, other, of_another_run, link, Path(os.path.relpath(marked))):
        owner_of(run_id, folder).write(tmp_path)
        with pytest.raises(ValueError, match=r"names the folder .*by hand") as caught:
            owned.sweep(tmp_path)
        assert "\n" not in str(caught.value)
        owned.clean(tmp_path, owner_of(run_id, folder))  # the guard does not ask first
        assert folder.is_dir()
    owner_of(run_id, marked).write(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(ValueError, match="belongs to user"):
            owned.sweep(tmp_path)
    assert owned.sweep(tmp_path) == [f"folder {marked}"]


def test_a_run_of_another_place_is_not_judged_by_its_process_id(tmp_path: Path) -> None:
    owner = owner_of(uuid.uuid4().hex, owned.make_folder("r"))
    owner.place = "host elsewhere, boot 1, pid:[1]"
    owner.write(tmp_path)
    with pytest.raises(ValueError, match="another machine, boot or container .host elsewhere"):
        owned.sweep(tmp_path)
    assert Path(owner.folder).is_dir() and (tmp_path / owned.OWNER_FILE).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"{",
        b"[1]",
        b"[" * 100_000,
        b'{"run_id":1,"pid":"x","started":0,"folder":5,"segments":null}',
        b'{"run_id":"r","pid":1,"started":0,"folder":"f","segments":[5]}',
    ],
)
def test_an_owner_file_of_wrong_types_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / owned.OWNER_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=r"owner.json is no owner file.*--out") as caught:
        owned.sweep(tmp_path)
    assert "\n" not in str(caught.value)


def test_segments_are_names_and_no_paths(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    owner = owner_of(uuid.uuid4().hex, tmp_path / "absent")
    owner.segments = [str(victim), os.path.relpath(victim, owned.SHM), "", ".."]
    owner.write(tmp_path)
    assert owned.sweep(tmp_path) == [] and victim.exists()


def test_a_relative_tmpdir_gives_an_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", ".")
    folder = owned.make_folder("r")
    assert folder.is_absolute() and folder.parent == tmp_path
    assert owned.folder_refusal(owned.Owner("r", 1, 0.0, str(folder))) is None


@pytest.mark.parametrize("patient", [True, False])
def test_semaphores_of_killed_processes_go_too(patient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are random; only the resource tracker of the process knows them, so it must outlive it."""
    if not patient:
        monkeypatch.setattr(owned, "TRACKER_S", 0.0)
    run_id = uuid.uuid4().hex
    code = (
        "import multiprocessing, time\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, owned.MARK: run_id}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    semaphore = owned.SHM / f"sem.{process.stdout.readline().strip().lstrip('/')}"
    try:
        wait_for(lambda: len(owned.processes(run_id)) == 2)
        assert semaphore.exists()
        assert owned.kill_all(run_id) == []
        assert semaphore.exists() != patient
    finally:
        process.kill()
        process.wait()
        semaphore.unlink(missing_ok=True)
