"""Set-up stops with one clear line, before vLLM is installed, when torch is not the CPU build."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import time
import zipfile
from pathlib import Path

import pytest

from megastream.rl.owned import start_time

ROOT = Path(__file__).parents[2]


def fake_index(folder: Path, version: str) -> str:
    """A package index that has one wheel: torch of some build."""
    page = folder / "torch"
    page.mkdir(parents=True)
    name, info = f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
    with zipfile.ZipFile(page / name, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (page / "index.html").write_text(f'<a href="{name}">{name}</a>')
    return folder.as_uri()


def set_up(venv: Path, index: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "VENV": str(venv), "TORCH_INDEX_URL": index}
    return subprocess.run(
        ["bash", "tools/setup.sh"],
        cwd=ROOT,
        env={**clean, **settings, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


FAKE_PYTHON = """#!/usr/bin/env bash
# A Python that makes environments of itself. Its pip downloads an empty torch, and installs as FAKE_INSTALL says.
case "$*" in
    "-c "*) exit 0 ;;
    "-m venv "*) mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python" ;;
    *" download "*torch==*) while [ "$1" != --dest ]; do shift; done; touch "$2/torch-1+cpu-x.whl" ;;
    *half.a) echo $$ >"$FAKE_PID"; sleep 60 ;;
    *half.b) until [ -s "$FAKE_PID" ]; do sleep 0.02; done; echo "ERROR: no disk"; exit 1 ;;
esac
"""


def fake_python(folder: Path) -> str:
    path = folder / "fake-python"
    path.write_text(FAKE_PYTHON)
    path.chmod(0o755)
    return str(path)


def test_a_folder_that_set_up_did_not_make_is_kept(tmp_path: Path) -> None:
    foreign, environment = tmp_path / "mine", tmp_path / "venv"
    for folder in (foreign, environment):
        folder.mkdir()
        (folder / "precious").touch()
    (environment / "pyvenv.cfg").touch()  # somebody's, but not ours
    for folder in (foreign, environment):
        done = set_up(folder, "", PYTHON=fake_python(tmp_path))
        assert done.returncode == 1 and f"VENV={folder} exists" in done.stderr
        assert len(done.stderr.splitlines()) == 1 and (folder / "precious").exists()


def test_a_failing_install_ends_the_other_one(tmp_path: Path) -> None:
    venv, pid = tmp_path / "venv", tmp_path / "pid"
    for _ in range(2):  # the second time over what the first one left, which is ours
        pid.unlink(missing_ok=True)
        done = set_up(venv, "", PYTHON=fake_python(tmp_path), FAKE_PID=str(pid))
        assert done.returncode == 1 and "install failed: ERROR: no disk" in done.stderr
        end = time.monotonic() + 10
        while start_time(int(pid.read_text())) is not None:
            assert time.monotonic() < end, "the pip in the background goes on"
            time.sleep(0.02)


def test_two_set_ups_wait_for_each_other(tmp_path: Path) -> None:
    folder = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    command = {**os.environ, "VENV": str(tmp_path / "venv"), "PYTHON": "/bin/false"}
    process = subprocess.Popen(["bash", "tools/setup.sh"], cwd=ROOT, env=command, stdout=-1, stderr=-1, text=True)
    try:
        assert process.stdout is not None
        assert "waiting for another set-up" in process.stdout.readline()
        assert process.poll() is None
    finally:
        os.close(folder)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1 and "Python 3.11" in said


@pytest.mark.full
def test_an_index_that_never_answers_is_named_soon(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        done = set_up(tmp_path / "venv", f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert done.returncode == 1 and "TORCH_INDEX_URL" in done.stderr
    assert time.monotonic() - begin < 90


def pinned_torch() -> str:
    lines = (ROOT / "versions.env").read_text().splitlines()
    return next(line.removeprefix("TORCH=") for line in lines if line.startswith("TORCH="))


def test_another_build_of_torch_is_refused(tmp_path: Path) -> None:
    done = set_up(tmp_path / "venv", fake_index(tmp_path / "index", pinned_torch()))
    assert done.returncode == 1
    assert "not the CPU build" in done.stderr and "TORCH_INDEX_URL" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list((tmp_path / "venv").rglob("vllm*"))
    assert not (tmp_path / "venv" / ".set-up").exists()


@pytest.mark.full
def test_an_index_without_torch_is_named(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    done = set_up(tmp_path / "venv", (tmp_path / "index").as_uri())
    assert done.returncode == 1
    assert "TORCH_INDEX_URL" in done.stderr and f"torch=={pinned_torch()}" in done.stderr


def test_another_python_is_refused(tmp_path: Path) -> None:
    done = set_up(tmp_path / "venv", "", PYTHON="/bin/false")
    assert done.returncode == 1
    assert "Python 3.11" in done.stderr and "/bin/false" in done.stderr


@pytest.mark.parametrize("script", ["tools/setup.sh", "tools/test.sh", "tools/quickstart.sh", ".ci/run"])
def test_scripts_parse_and_name_no_host(script: str) -> None:
    text = (ROOT / script).read_text()
    assert subprocess.run(["bash", "-n", script], cwd=ROOT, check=False).returncode == 0
    assert "http" not in text
