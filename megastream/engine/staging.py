"""Staging memory of one engine rank: room for whole versions, in the layout of the live buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch

from megastream.engine.scatter import target_region, torch_dtype
from megastream.layout.shard import RankLayout
from megastream.plan.types import Copy, Piece


class NoStagingRoom(RuntimeError):
    """A staging set could not be allocated. Names its bytes, where they should lie, and the remedy."""


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

    On a GPU a commit is enqueued and runs later: `reads` marks that, and who writes into the set next waits behind it.
    """

    def __init__(
        self,
        layout: RankLayout,
        copies: Mapping[str, tuple[Copy, ...]],
        num_sets: int,
        *,
        pin_memory: bool,
        device: str = "cpu",
    ) -> None:
        self._specs = {spec.name: spec for spec in layout.buffers if spec.name in copies}
        self._copies = copies
        self._device = torch.device(device)
        self._pin = pin_memory and self._device.type == "cpu"
        self._sets: list[dict[str, torch.Tensor] | None] = [None] * num_sets
        self._allocating = threading.Lock()
        self._reads: dict[int, torch.cuda.Event] = {}

    def bytes_of(self, slot: int) -> int:
        """Bytes of one set; 0 before its first use."""
        return sum(t.numel() * t.element_size() for t in (self._sets[slot] or {}).values())

    def buffers(self, slot: int) -> dict[str, torch.Tensor]:
        """The flat tensors of a set. Any thread; at first use this allocates, which takes seconds where it is large.

        NoStagingRoom when there is no memory for it.
        """
        if (there := self._sets[slot]) is not None:
            return there
        with self._allocating:
            if (buffers := self._sets[slot]) is None:
                buffers = self._allocate_all()
                self.finish_writes()  # other lanes' streams write there, too
                self._sets[slot] = buffers
            return buffers

    def _allocate_all(self) -> dict[str, torch.Tensor]:
        try:
            return {name: self._allocate(name) for name in self._specs}
        except RuntimeError as error:  # what torch raises without memory, on a GPU a kind of it
            raise self._no_room(error) from error

    def _no_room(self, error: RuntimeError) -> NoStagingRoom:
        num_bytes = sum(spec.num_elements * torch_dtype(spec.dtype).itemsize for spec in self._specs.values())
        where = "host memory" if self._device.type == "cpu" else f"memory of {self._device}"
        why = (str(error).splitlines() or ["no reason given"])[0]
        return NoStagingRoom(
            f"no room for staging: {num_bytes} bytes of {where}, one of {len(self._sets)} sets ({why}); set "
            "megastream.settings.staging_sets lower, or leave this engine more memory"
        )

    def finish_writes(self) -> None:
        """Blocks until this thread's writes into a set are done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def reads(self, slot: int) -> None:
        """What was enqueued on the current stream until now reads the set."""
        if self._device.type == "cuda":
            event = self._reads[slot] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))

    def await_reads(self, slot: int) -> None:
        """The current stream goes on once the set was read. Blocks nobody else."""
        if (event := self._reads.get(slot)) is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _allocate(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        flat = torch.zeros(spec.num_elements, dtype=torch_dtype(spec.dtype), pin_memory=self._pin, device=self._device)
        if flat.is_floating_point():
            for copy in self._copies[name]:
                target_region(flat, copy).fill_(float("nan"))
        return flat
