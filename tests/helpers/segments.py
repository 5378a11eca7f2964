"""Segments in /dev/shm that vLLM leaves when it kills its workers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megastream.rl import owned


def segments_of(pid: int) -> set[str]:
    """Names of vLLM's segments in /dev/shm that a process uses, or one below it."""
    return {name for one in below(pid) for name in owned.mapped(one) if name.startswith("vllm_dist")}


def below(pid: int) -> list[int]:
    """A process, its children, and theirs."""
    pids = [pid]
    for one in pids:  # grows while it is read
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            with suppress(OSError):  # a thread that has ended meanwhile has none
                pids += map(int, children.read_text().split())
    return pids


def remove(segments: Iterable[str]) -> None:
    """What `segments_of` found while the processes lived, once they are gone."""
    for name in segments:
        (owned.SHM / name).unlink(missing_ok=True)
