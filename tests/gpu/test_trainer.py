"""On CUDA and NCCL, with TransformerEngine's fused Adam where it is there, every policy equals stock bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.steps import ALL, STEPS, compare
from tests.helpers.tiny import tiny_config


@pytest.mark.parametrize("clip", [0.3, 0.0])
def test_one_gpu_equals_stock(clip: float) -> None:
    """Fused Adam counts steps in its groups, so an abort must not advance them."""
    policies = ("whole", "pipelined", "speculative") if clip else ALL
    for stock, *_, speculative in compare(tiny_config(clip=clip), 1, policies):
        assert stock["clipped"] == speculative["aborts"] == (STEPS if clip else 0)
        assert clip or speculative["early"] == speculative["buckets"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank for each GPU")
@pytest.mark.parametrize("layout", [{"pp": 2}, {"ep": 2}])
@pytest.mark.parametrize("clip", [0.3, 0.0])
def test_two_gpus_equal_stock(layout: dict[str, int], clip: float) -> None:
    policies = ("whole", "pipelined", "speculative") if clip else ALL
    for stock, _, pipelined, *_ in compare(tiny_config(clip=clip, **layout), 2, policies):
        assert stock["clipped"] == (STEPS if clip else 0)
        assert pipelined["buckets"] > 2
