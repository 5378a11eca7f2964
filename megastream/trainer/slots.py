"""The memory in which packed pieces wait for their acknowledgement: a bounded number of slots for each engine rank."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from megastream.plan.types import Piece


class Slots:
    """One thread takes, the lanes' threads give back. `most` is what was asked for; a target may have needed fewer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self.wanted = "nothing"
        """What a slot is waited for."""
        self._free: dict[int, list[torch.Tensor]] = {}

    def fill(self, target: int, slots: list[torch.Tensor]) -> None:
        """Before anything is taken."""
        self._free[target] = slots

    def take(self, piece: Piece, is_over: Callable[[], bool], deadline_s: float) -> torch.Tensor | None:
        """A slot, as soon as one is free. None once `is_over`, of which `wake` tells, and after the deadline."""
        free = self._free[piece.target]
        with self._changed:
            if not free:
                self.wanted = f"{piece.source_buffer} (unit {piece.unit}) to engine rank {piece.target}"
            if self._changed.wait_for(lambda: free or is_over(), deadline_s):
                self.wanted = "nothing"
            return free.pop() if free and not is_over() else None

    def give(self, target: int, slot: torch.Tensor) -> None:
        with self._changed:
            self._free[target].append(slot)
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def __str__(self) -> str:
        return ", ".join(f"rank {t}: {len(free)} of {self._most} free" for t, free in self._free.items()) or "none"
