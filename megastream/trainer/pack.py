"""Executes the source side of copies: strided regions of a bucket, laid one behind the other in a flat payload."""

from __future__ import annotations

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
    """Brings pieces of CPU or CUDA buckets into CPU slots. Belongs to one thread.

    On CUDA it gathers on a stream of its own, behind the event that the training thread recorded, and copies the
    packed bytes down in one go; the compute stream is never waited on by the host.
    """

    def __init__(self, device: torch.device, max_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._packed = torch.empty(max_bytes if self._stream else 0, dtype=torch.uint8, device=device)

    def new_slot(self, num_bytes: int) -> torch.Tensor:
        """A flat uint8 CPU tensor, pinned where a GPU copies into it."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    @torch.no_grad()
    def fill(self, piece: Piece, bucket: torch.Tensor, final: torch.cuda.Event | None, slot: torch.Tensor) -> None:
        """Packs a piece into the first `piece.num_bytes` bytes of `slot`. Returns when the bytes are there."""
        dtype = getattr(torch, piece.dtype)
        payload = slot[: piece.num_bytes]
        if self._stream is None or final is None:
            pack(piece, bucket, payload.view(dtype))
            return
        packed = self._packed[: piece.num_bytes]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(final)
            pack(piece, bucket, packed.view(dtype))
            payload.copy_(packed, non_blocking=True)
        self._stream.synchronize()
