"""Staging memory of one engine rank: room for whole versions, in the layout of the live buffers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import torch

from megastream.engine.scatter import target_region, torch_dtype
from megastream.engine.settings import EngineSettings
from megastream.layout.shard import BufferSpec, RankLayout
from megastream.plan.tiers import Placement, bundles_of, place
from megastream.plan.types import Copy, Piece
from megastream.protocol.mix import Gate
from megastream.protocol.terms import ProtocolError


class NoStagingRoom(RuntimeError):
    """A staging set could not be allocated. Names its bytes, where they should lie, and the remedy."""


def copies_by_buffer(pieces: Iterable[Piece]) -> dict[str, tuple[Copy, ...]]:
    """The copies that write each engine buffer, in plan order."""
    copies: dict[str, list[Copy]] = {}
    for piece in pieces:
        for copy in piece.copies:
            copies.setdefault(copy.target_buffer, []).append(copy)
    return {name: tuple(group) for name, group in copies.items()}


def placement_of(pieces: Iterable[Piece], layout: RankLayout, settings: EngineSettings) -> Placement:
    """Where the units of these pieces, all of one engine rank, wait for their commit."""
    pairs = ((piece.unit, copy.target_buffer) for piece in pieces for copy in piece.copies)
    sizes = {spec.name: _bytes_of(spec) for spec in layout.buffers}
    return place(bundles_of(pairs, sizes), settings.staging, settings.staging_sets)


def check_pull(placement: Placement, gate: Gate, is_overlay: bool) -> None:
    """ProtocolError where nothing can be pulled: by how many bytes staging is too small, and what to set."""
    if placement.pulled and (gate != "version" or is_overlay):
        what = "overlays are" if is_overlay else f"gate {gate} is"
        raise ProtocolError(f"{what} for engines that stage everything, and {placement.shortage}")


def _bytes_of(spec: BufferSpec) -> int:
    return spec.num_elements * torch_dtype(spec.dtype).itemsize


class StagingMemory:
    """Up to `num_sets` sets of flat tensors, one per buffer that the plan writes; a set is allocated at first use.

    Planned elements start as NaN, so that bytes which never arrived cannot pass for weights; the others (padding)
    are zero, as the engine's own loader leaves them.

    Buffers in `host` lie in host memory, the others on `device`, the weights' own where `host` names any.

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
        host: Collection[str] = (),
    ) -> None:
        self._specs = {spec.name: spec for spec in layout.buffers if spec.name in copies}
        self._copies = copies
        self._device = torch.device(device)
        self._host = frozenset(host)
        self._pin = pin_memory
        self._sets: list[dict[str, torch.Tensor] | None] = [None] * num_sets
        self._allocating = threading.Lock()
        self._reads: dict[int, torch.cuda.Event] = {}

    def bytes_of(self, slot: int) -> int:
        """Bytes of one set; 0 before its first use."""
        return sum(t.nbytes for t in (self._sets[slot] or {}).values())

    @property
    def tier_bytes(self) -> tuple[int, int]:
        """Bytes allocated now (on the device, in `host`)."""
        sizes = [(name in self._host, t.nbytes) for there in self._sets for name, t in (there or {}).items()]
        return sum(size for is_host, size in sizes if not is_host), sum(size for is_host, size in sizes if is_host)

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
        num_bytes: Counter[str] = Counter()
        for name, spec in self._specs.items():
            device = self._device_of(name)
            num_bytes["host memory" if device.type == "cpu" else f"memory of {device}"] += _bytes_of(spec)
        needs = " and ".join(f"{count} bytes of {where}" for where, count in sorted(num_bytes.items()))
        why = (str(error).splitlines() or ["no reason given"])[0]
        return NoStagingRoom(
            f"no room for staging: {needs}, one of {len(self._sets)} sets ({why}); set "
            "megastream.settings.staging_sets lower, bound it by megastream.settings.staging, or leave this engine "
            "more memory"
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
        """The current stream goes on once the set was read, and this thread too where it writes into host memory.
        Blocks nobody else."""
        if (event := self._reads.get(slot)) is None:
            return
        torch.cuda.current_stream(self._device).wait_event(event)
        if self._host:
            event.synchronize()

    def _device_of(self, name: str) -> torch.device:
        return torch.device("cpu") if name in self._host else self._device

    def _allocate(self, name: str) -> torch.Tensor:
        spec, device = self._specs[name], self._device_of(name)
        pin = self._pin and device.type == "cpu"
        flat = torch.zeros(spec.num_elements, dtype=torch_dtype(spec.dtype), pin_memory=pin, device=device)
        if flat.is_floating_point():
            for copy in self._copies[name]:
                target_region(flat, copy).fill_(float("nan"))
        return flat
