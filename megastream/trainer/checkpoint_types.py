"""What goes into and comes out of a trainer's checkpoints, and what a training that resumes must share with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """`keep` complete checkpoints stay; `deadline_s` ends a save, and the wait for a folder in use.

    `launch` names this start of the trainer, the same on all ranks.
    """

    keep: int
    deadline_s: float
    launch: str


@dataclass(frozen=True)
class Saved:
    """One published checkpoint: the training stood for `blocked_s`, and after `total_s` it had its name."""

    step: int
    path: Path
    num_bytes: int
    blocked_s: float
    total_s: float
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Resumed:
    """What was loaded. `refused`: why newer ones are not whole. `same_layout`: random states were restored, too.

    With `weights_only` nothing but the weights is the checkpoint's: no moments, no step, no data position.
    """

    step: int
    path: Path
    state: dict[str, Any]
    refused: tuple[str, ...]
    same_layout: bool
    weights_only: bool


def mismatch(path: Path, there: dict[str, Any], here: dict[str, Any], allowed: Sequence[str]) -> str:
    """What differs between a checkpoint's facts and this training's, or nothing."""
    old, new = dict(_flat(there, "")), dict(_flat(here, ""))
    names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    differing = [name for name in names if not any(name == a or name.startswith(f"{a}.") for a in allowed)]
    if not differing:
        return ""
    words = ", ".join(f"{name} is {old.get(name)!r} there and {new.get(name)!r} here" for name in differing[:3])
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return f"checkpoint {path} does not fit: {words}{more}; use the settings it was saved with, or another folder"


def _flat(facts: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in facts.items():
        found += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return found
