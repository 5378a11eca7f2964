"""Compares staged bytes with the live ones, in slices short enough not to hold up decoding."""

from __future__ import annotations

import time
from collections.abc import Mapping

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
            self.tensors += 1
            if not self._equal(name):
                self.differing += 1
                self.first = self.first or name
            if time.monotonic() >= end:
                break
        return not self._todo

    def _equal(self, name: str) -> bool:
        staged, live = self._staged[name], self._live.read_live(name).contiguous().view(-1)
        if live.dtype != staged.dtype or live.numel() != staged.numel():
            return False
        return all(_same_values(target_region(staged, copy), target_region(live, copy)) for copy in self._copies[name])


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(canonical(a), canonical(b))
