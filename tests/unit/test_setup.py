"""Set-up stops with one clear line, before vLLM is installed, when torch is not the CPU build."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

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
