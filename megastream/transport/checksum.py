"""The checksum of every payload: xxh3-64 over a CPU tensor's memory, a weighted sum of its words on a GPU.

Both ends of a lane have payloads on the same kind of device, so the two are never compared with each other.
"""

from __future__ import annotations

import torch
import xxhash

_WORD_BYTES = 8
_ROW_WORDS = 1 << 16
"""Words of a row, and the most rows: enough for 32 GiB."""
_GOLDEN, _OTHER = -7046029254386353131, -4417276706812531889
"""Odd, with bits all over (2^64 over the golden ratio; from xxhash), as signed numbers."""
_MASK = (1 << 64) - 1


def checksum(payload: torch.Tensor) -> int:
    """64 bits over a contiguous uint8 tensor, as PieceHeader.checksum wants them. On a GPU it blocks for the result."""
    if payload.is_cuda:
        return WeightedSum(payload.device)(payload)
    return xxhash.xxh3_64_intdigest(payload.numpy().data)


class WeightedSum:
    """Sum over all 8-byte words, each times an odd weight of its position, modulo 2^64. Keeps the weights of a device.

    A single changed word always shows, because an odd weight has an inverse; so do words that changed places, but for
    chance. Works on the current stream, blocks for the result, and makes a temporary of the payload's size.
    """

    def __init__(self, device: torch.device) -> None:
        self._in_row, self._in_rest = _weights(_GOLDEN, device), _weights(_GOLDEN ^ _OTHER | 1, device)
        self._of_row = _weights(_OTHER, device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams use them, too

    def __call__(self, payload: torch.Tensor) -> int:
        words = _words(payload)
        num_rows = words.numel() // _ROW_WORDS
        total = torch.zeros((), dtype=torch.int64, device=payload.device)
        if num_rows:
            rows = (words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS) * self._in_row).sum(1)
            total = (rows * self._of_row[:num_rows]).sum()
        rest = words[num_rows * _ROW_WORDS :]
        if rest.numel():
            total = total + (rest * self._in_rest[: rest.numel()]).sum()
        return (int(total) + payload.numel()) & _MASK


def _words(payload: torch.Tensor) -> torch.Tensor:
    """The payload as int64, filled up with zeros; its length is counted apart."""
    missing = -payload.numel() % _WORD_BYTES
    if missing or payload.data_ptr() % _WORD_BYTES:
        padded = torch.zeros(payload.numel() + missing, dtype=torch.uint8, device=payload.device)
        padded[: payload.numel()] = payload
        payload = padded
    return payload.view(torch.int64)


def _weights(factor: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, _ROW_WORDS + 1, device=device).mul_(factor).bitwise_or_(1)


def check_payload(payload: torch.Tensor, num_bytes: int, what: str, device: str = "cpu") -> None:
    """Refuses, by name and before any byte moves, a buffer whose raw memory is not the payload."""
    described = f"{what}: payload of shape {tuple(payload.shape)}, {payload.dtype}, on {payload.device}"
    flat = payload.dim() == 1 and payload.dtype == torch.uint8
    if not flat or payload.device != torch.device(device):
        raise ValueError(f"{described}; this lane takes 1-D uint8 tensors on {device}")
    if not payload.is_contiguous():
        raise ValueError(f"{described} is not contiguous (stride {payload.stride()}); pack it first")
    if payload.numel() < num_bytes or num_bytes < 1:
        raise ValueError(f"{described} for a piece of {num_bytes} bytes; at least 1 and at most {payload.numel()} fit")
