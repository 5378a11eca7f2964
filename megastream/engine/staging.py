"""Staging memory of one engine rank: room for whole versions, in the layout of the live buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megastream.engine.scatter import target_region, torch_dtype
from megastream.layout.shard import RankLayout
from megastream.plan.types import Copy, Piece


def copies_by_buffer(pieces: Iterable[Piece]) -> dict[str, tuple[Copy, ...]]:
    """The copies that write each engine buffer, in plan order."""
    copies: dict[str, list[Copy]] = {}
    for piece in pieces:
        for copy in piece.copies:
            copies.setdefault(copy.target_buffer, []).append(copy)
    return {name: tuple(group) for name, group in copies.items()}


class StagingMemory:
    """Up to `num_sets` sets of flat tensors, one per buffer that the plan writes; a set is allocated at first use.

    Planned elements start as NaN, so that bytes which never arrived cannot pass for weights; the others (padding)
    are zero, as the engine's own loader leaves them.
    """

    def __init__(
        self, layout: RankLayout, copies: Mapping[str, tuple[Copy, ...]], num_sets: int, *, pin_memory: bool
    ) -> None:
        self._specs = {spec.name: spec for spec in layout.buffers if spec.name in copies}
        self._copies = copies
        self._pin = pin_memory
        self._sets: list[dict[str, torch.Tensor] | None] = [None] * num_sets

    @property
    def num_bytes(self) -> int:
        """Bytes allocated now."""
        return sum(t.numel() * t.element_size() for buffers in self._sets if buffers for t in buffers.values())

    def buffers(self, slot: int) -> dict[str, torch.Tensor]:
        """The flat tensors of a set. Not thread-safe at first use."""
        buffers = self._sets[slot]
        if buffers is None:
            buffers = self._sets[slot] = {name: self._allocate(name) for name in self._specs}
        return buffers

    def _allocate(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        flat = torch.zeros(spec.num_elements, dtype=torch_dtype(spec.dtype), pin_memory=self._pin)
        if flat.is_floating_point():
            for copy in self._copies[name]:
                target_region(flat, copy).fill_(float("nan"))
        return flat
