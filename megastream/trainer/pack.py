"""Executes the source side of copies: strided regions of a bucket, laid one behind the other in a flat payload."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megastream.plan.types import Piece


def pack(piece: Piece, bucket: torch.Tensor, payload: torch.Tensor) -> None:
    """Fills `payload` (flat, `piece.num_elements` of the piece's dtype) from `bucket` (flat, on the same device).

    Every copy is packed row-major in its own shape; a cast, where the piece has one, happens in the same pass. On CUDA
    the work is enqueued on the current stream.
    """
    at = 0
    for copy in piece.copies:
        source = bucket.as_strided(copy.shape, copy.source_strides, bucket.storage_offset() + copy.source_offset)
        size = source.numel()
        payload[at : at + size].view(copy.shape).copy_(source)
        at += size


class Packer:
    """Brings pieces of CPU or CUDA buckets into slots, on the CPU or on the bucket's GPU. Belongs to one thread.

    On CUDA it gathers on a stream of its own, behind the event that the training thread recorded; into a CPU slot it
    copies the packed bytes down in one go. The compute stream is never waited on by the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._packed = torch.empty(0, dtype=torch.uint8, device=device)

    def new_slot(self, num_bytes: int, where: str) -> torch.Tensor:
        """A flat uint8 tensor on `where`, "cpu" or the bucket's GPU; pinned where a GPU copies into it."""
        on_cpu = where == "cpu"
        if on_cpu and self._stream is not None and self._packed.numel() < num_bytes:
            self._packed = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return torch.empty(num_bytes, dtype=torch.uint8, device=where, pin_memory=on_cpu and self._stream is not None)

    @torch.no_grad()
    def fill(
        self,
        piece: Piece,
        bucket: torch.Tensor,
        final: torch.cuda.Event | None,
        slot: torch.Tensor,
        checksum: Callable[[torch.Tensor], int],
    ) -> int:
        """Packs a piece into the first `piece.num_bytes` bytes of `slot`; its checksum, once the bytes are there."""
        dtype = getattr(torch, piece.dtype)
        payload = slot[: piece.num_bytes]
        if self._stream is None or final is None:
            pack(piece, bucket, payload.view(dtype))
            return checksum(payload)
        packed = payload if slot.is_cuda else self._packed[: piece.num_bytes]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(final)
            pack(piece, bucket, packed.view(dtype))
            if not slot.is_cuda:
                payload.copy_(packed, non_blocking=True)
                self._stream.synchronize()
            return checksum(payload)  # of bytes on a GPU: in this stream, and waited for
