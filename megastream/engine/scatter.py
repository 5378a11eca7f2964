"""Writes a received piece into staging, and finds the same elements in live weights."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from megastream.plan.types import Copy, Piece


def torch_dtype(name: str) -> torch.dtype:
    """`torch.bfloat16` for "bfloat16". ValueError names anything that torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def target_region(flat: torch.Tensor, copy: Copy) -> torch.Tensor:
    """The elements that a copy writes, as a view of shape `copy.shape` into a flat target buffer."""
    return flat.as_strided(copy.shape, copy.target_strides, flat.storage_offset() + copy.target_offset)


def scatter(piece: Piece, payload: torch.Tensor, buffer_of: Callable[[str], torch.Tensor]) -> int:
    """Writes a piece's payload (1-D uint8, at least `num_bytes` long) into the flat buffers that its copies name.

    Copies lie in the payload one behind the other, each row-major in its own shape. Returns the elements written.
    """
    elements = payload[: piece.num_bytes].view(torch_dtype(piece.dtype))
    begin = 0
    for copy in piece.copies:
        end = begin + prod(copy.shape)
        target_region(buffer_of(copy.target_buffer), copy).copy_(elements[begin:end].view(copy.shape))
        begin = end
    return begin


def finish_on_gpu(tensor: torch.Tensor) -> None:
    """Blocks until what this thread enqueued on the tensor's GPU is done; nothing for one on the CPU."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
