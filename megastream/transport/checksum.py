"""The checksum of every payload: xxh3-64, over the tensor's own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch


def checksum(payload: torch.Tensor) -> int:
    """xxh3-64 of a contiguous uint8 CPU tensor, as PieceHeader.checksum wants it. Copies nothing."""
    return xxhash.xxh3_64_intdigest(payload.numpy().data)


def check_payload(payload: torch.Tensor, num_bytes: int, what: str) -> None:
    """Refuses, by name and before any byte moves, a buffer whose raw memory is not the payload."""
    described = f"{what}: payload of shape {tuple(payload.shape)}, {payload.dtype}, on {payload.device}"
    if payload.dim() != 1 or payload.element_size() != 1 or payload.dtype.is_signed or payload.device.type != "cpu":
        raise ValueError(f"{described}; this transport takes 1-D uint8 CPU tensors")
    if not payload.is_contiguous():
        raise ValueError(f"{described} is not contiguous (stride {payload.stride()}); pack it first")
    if payload.numel() < num_bytes or num_bytes < 1:
        raise ValueError(f"{described} for a piece of {num_bytes} bytes; at least 1 and at most {payload.numel()} fit")
