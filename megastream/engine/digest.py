"""One number for a tensor's values, the same wherever they were read."""

from __future__ import annotations

import torch
import xxhash


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The values as bytes (flat uint8, row-major), without what kernels that hold packed weights do not show.

    Such kernels are read back by multiplying with an identity matrix. They do not compute with the sign of a zero or
    with values below the smallest normal number either: both become 0 here.
    """
    values = tensor.detach().cpu().contiguous()
    if values.is_floating_point():
        values = torch.where(values.abs() < torch.finfo(values.dtype).tiny, torch.zeros_like(values), values)
    return values.view(-1).view(torch.uint8)


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-64 (hex) of the canonical bytes."""
    return xxhash.xxh3_64_hexdigest(canonical(tensor).numpy().data)
