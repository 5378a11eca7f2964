"""The memory in which packed pieces wait for their acknowledgement: a bounded number of slots for each engine rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import torch

from megastream.plan.types import Piece


class Slots:
    """One thread takes, the lanes' threads give back. `most` is what was asked for; a target may have needed fewer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self.wanted = "nothing"
        """What a slot is waited for."""
        self.may_leave = threading.Event()
        """What lies in slots may go onto its lane."""
        self.may_leave.set()
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
        """Something is over: nobody waits any more, for a slot or to leave."""
        self.may_leave.set()
        with self._changed:
            self._changed.notify_all()

    def waits_for(self, leases: Iterable[str], missing: Iterable[str], unacknowledged: Mapping[int, int]) -> str:
        """Who waits for whom, for an error message."""
        left = ", ".join(f"rank {t}: {count}" for t, count in unacknowledged.items() if count)
        return (
            f"packing {self.wanted}; leased {sorted(leases)}; not yet final {sorted(missing)}; "
            f"slots by engine rank: {self}; pieces not acknowledged: {left or 'none'}; "
            f"raise transfer_s for an engine that only needs longer for a piece"
        )

    def __str__(self) -> str:
        return ", ".join(f"rank {t}: {len(free)} of {self._most} free" for t, free in self._free.items()) or "none"
