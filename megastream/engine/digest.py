"""One number for a tensor's values, the same wherever they were read."""

from __future__ import annotations

import torch
import xxhash


def tensor_digest(tensor: torch.Tensor) -> str:
    """xxh3-64 (hex) of the values in row-major order.

    Zeros lose their sign and values below the smallest normal number become 0 first: kernels that hold packed weights
    neither show these nor compute with them, so a digest must not depend on them.
    """
    values = tensor.detach().cpu().contiguous()
    values = torch.where(values.abs() < torch.finfo(values.dtype).tiny, torch.zeros_like(values), values)
    return xxhash.xxh3_64_hexdigest(values.view(-1).view(torch.uint8).numpy())
