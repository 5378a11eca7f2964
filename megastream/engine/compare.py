"""Compares staged bytes with the live ones, in slices short enough not to hold up decoding."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from megastream.engine.contract import LiveModel
from megastream.engine.digest import canonical
from megastream.engine.scatter import target_region
from megastream.plan.types import Copy


class Comparison:
    """Bit by bit, over exactly the elements that the plan writes. Only on the worker's own thread.

    What no kernel computes with is left out: see `canonical`.
    """

    def __init__(
        self, live: LiveModel, staged: Mapping[str, torch.Tensor], copies: Mapping[str, tuple[Copy, ...]]
    ) -> None:
        self._live, self._staged, self._copies = live, staged, copies
        self._todo = list(copies)
        self.tensors = 0
        self.differing = 0
        self.first = ""

    def step(self, slice_s: float) -> bool:
        """Compares buffers until `slice_s` is over, at least one. True when all are done. LiveModelError when a live
        buffer cannot be read."""
        end = time.monotonic() + slice_s
        while self._todo:
            name = self._todo.pop(0)
            self.add(name, self._staged[name], self._copies[name])
            if time.monotonic() >= end:
                break
        return not self._todo

    def add(self, name: str, came: torch.Tensor, copies: Sequence[Copy]) -> None:
        """Compares one buffer, of which `came` has what the copies write."""
        self.tensors += 1
        if not self._equal(name, came, copies):
            self.differing += 1
            self.first = self.first or name

    def _equal(self, name: str, came: torch.Tensor, copies: Sequence[Copy]) -> bool:
        live = self._live.read_live(name).contiguous().view(-1)
        if live.dtype != came.dtype or live.numel() != came.numel():
            return False
        return all(_same_values(target_region(came, copy), target_region(live, copy)) for copy in copies)


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(canonical(a), canonical(b))
