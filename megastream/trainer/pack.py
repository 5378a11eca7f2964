"""Executes the source side of copies: strided regions of a bucket, laid one behind the other in a flat payload."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megastream.plan.types import Piece


def regions(piece: Piece, bucket: torch.Tensor) -> list[torch.Tensor]:
    """What a piece's copies read out of `bucket` (flat): views in their shapes, contiguous ones 1-D."""
    begin = bucket.storage_offset()
    views = [bucket.as_strided(c.shape, c.source_strides, begin + c.source_offset) for c in piece.copies]
    return [view.view(-1) if view.is_contiguous() else view for view in views]


def pack(sources: list[torch.Tensor], payload: torch.Tensor) -> None:
    """Fills `payload` (flat, as many elements as the sources have, on their device) from the regions of a piece.

    Every copy is packed row-major in its own shape; a cast, where the piece has one, happens in the same pass. On CUDA
    the work is enqueued on the current stream, in few launches.
    """
    parts = payload.split([source.numel() for source in sources])
    pairs = zip(parts, sources, strict=True)
    torch._foreach_copy_([part if source.dim() == 1 else part.view(source.shape) for part, source in pairs], sources)


BeginSum = Callable[[torch.Tensor, torch.cuda.Stream | None], Callable[[], int]]
"""A lane's `checksum`."""


class Packer:
    """Brings pieces of CPU or CUDA buckets into slots, on the CPU or on the bucket's GPU.

    Belongs to one thread, which works without gradients from then on, and on CUDA on a stream of its own: behind the
    event that the training thread recorded. Into a CPU slot it copies the packed bytes down in one go. The compute
    stream is never waited on by the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        torch.set_grad_enabled(False)
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        self._waited: torch.cuda.Event | None = None
        self._regions: dict[int, list[torch.Tensor]] = {}
        """Of the pieces that were packed before, by their number: buckets stay where they are."""
        self._packed = torch.empty(0, dtype=torch.uint8, device=device)

    def new_slot(self, num_bytes: int, where: str) -> torch.Tensor:
        """A flat uint8 tensor on `where`, "cpu" or the bucket's GPU; pinned where a GPU copies into it."""
        on_cpu = where == "cpu"
        if on_cpu and self._stream is not None and self._packed.numel() < num_bytes:
            self._packed = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return torch.empty(num_bytes, dtype=torch.uint8, device=where, pin_memory=on_cpu and self._stream is not None)

    def fill(
        self,
        piece: Piece,
        bucket: torch.Tensor,
        final: torch.cuda.Event | None,
        slot: torch.Tensor,
        begin_sum: BeginSum,
    ) -> tuple[torch.Tensor, Callable[[], int]]:
        """Packs a piece into the first `piece.num_bytes` bytes of `slot`: these, and what blocks for their checksum.

        On a GPU the bytes are there when that is known, or when `finish` has returned.
        """
        if (sources := self._regions.get(piece.seq)) is None:
            sources = self._regions[piece.seq] = regions(piece, bucket)
        payload = slot[: piece.num_bytes]
        gathered = self._packed[: piece.num_bytes] if bucket.is_cuda and not slot.is_cuda else payload
        if self._stream is not None and final is not None and final is not self._waited:
            self._waited = final  # once for all pieces of a bucket
            self._stream.wait_event(final)
        pack(sources, gathered.view(getattr(torch, piece.dtype)))
        if gathered is not payload:
            payload.copy_(gathered, non_blocking=True)
            self.finish()
        return payload, begin_sum(payload, self._stream)

    def finish(self) -> None:
        """Blocks until everything is packed: the buckets may change."""
        if self._stream is not None:
            self._stream.synchronize()
