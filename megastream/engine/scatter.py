"""Writes a received piece into staging, and finds the same elements in live weights."""

from __future__ import annotations

from collections.abc import Callable

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


def target_regions(piece: Piece, buffer_of: Callable[[str], torch.Tensor]) -> list[torch.Tensor]:
    """Where a piece's copies go in the flat buffers that they name: views in their shapes, contiguous ones 1-D."""
    views = [target_region(buffer_of(copy.target_buffer), copy) for copy in piece.copies]
    return [view.view(-1) if view.is_contiguous() else view for view in views]


def scatter(piece: Piece, payload: torch.Tensor, regions: list[torch.Tensor]) -> int:
    """Writes a piece's payload (1-D uint8, at least `num_bytes` long) into its target regions.

    Copies lie in the payload one behind the other, each row-major in its own shape. On a GPU it takes few launches.
    Returns the elements written.
    """
    sizes = [region.numel() for region in regions]
    elements = payload[: piece.num_bytes].view(torch_dtype(piece.dtype))[: sum(sizes)]
    pairs = zip(elements.split(sizes), regions, strict=True)
    torch._foreach_copy_(regions, [part if region.dim() == 1 else part.view(region.shape) for part, region in pairs])
    return sum(sizes)


def finish_on_gpu(tensor: torch.Tensor) -> None:
    """Blocks until what this thread enqueued on the tensor's GPU is done; nothing for one on the CPU."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
