"""In-band reports of the ranks to the engine core: a small shared page, written before a step's tokens can leave.

Replies of a step come from one rank only, so the others need another way to say "my live version is not the stamp's".
All ranks have begun a step before its output exists (tensor and expert parallel ranks meet in every layer, pipeline
stages follow each other), so what they wrote is there when the core reads.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

_SLOT_BYTES = 8


class Board:
    """The core's end. The file lies in a private temporary folder until `unlink`, its memory until `close`."""

    def __init__(self, num_ranks: int):
        self._folder = tempfile.TemporaryDirectory(prefix="megastream-board-")
        self.path = Path(self._folder.name) / "board"
        self.path.write_bytes(bytes(num_ranks * _SLOT_BYTES))
        self._map = _map(self.path)
        self._slots = memoryview(self._map).cast("Q")

    def reports(self) -> tuple[int, ...]:
        """Number of differences that each rank has reported so far."""
        return tuple(self._slots)

    def unlink(self) -> None:
        """Removes file and folder; the ranks must have opened it. From here on even a killed core leaves nothing."""
        self._folder.cleanup()

    def close(self) -> None:
        self.unlink()
        self._slots.release()
        self._map.close()


class BoardSlot:
    """One rank's end."""

    def __init__(self, path: str, rank: int):
        self._map = _map(Path(path))
        self._slots = memoryview(self._map).cast("Q")
        self._rank = rank

    def report(self) -> None:
        """Adds one difference. Only this rank writes its slot."""
        self._slots[self._rank] += 1


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
