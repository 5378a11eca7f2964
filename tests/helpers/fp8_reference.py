"""Blockwise fp8 by hand, block by block with torch's own float8: what `megastream.convert.fp8` is held against."""

from __future__ import annotations

import re

import torch

LINEAR = re.compile(
    r"\.(q|k|v|o|gate|up|down|q_a|q_b|kv_a|kv_b|out|in)_proj(_with_mqa|_qkvz)?\.weight$|\.w[123]\.weight$"
)
"""Hugging Face's names of linears of attention, MLPs and experts, in all families that are not stacked."""


def slow_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn and its scales."""
    codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.full([-(-size // 128) for size in weight.shape], float("nan"))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            block = weight[place].float()
            scales[row, column] = (block.abs().max() / 448).clamp(min=torch.finfo(torch.float32).tiny)
            codes[place] = (block / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def slow_plain(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights in fp32 that these stand for."""
    rows, columns = codes.shape
    return codes.float() * scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
