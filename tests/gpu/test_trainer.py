"""On CUDA and NCCL, too, whole and pipelined steps equal stock bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_stepper import STEPS, compare_with_stock
from tests.helpers.tiny import tiny_config


@pytest.mark.parametrize("clip", [0.3, 0.0])
def test_one_gpu_equals_stock(clip: float) -> None:
    for stock, _, _ in compare_with_stock(tiny_config(clip=clip), 1):
        assert stock["clipped"] == (STEPS if clip else 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank for each GPU")
@pytest.mark.parametrize("layout", [{"pp": 2}, {"ep": 2}])
def test_two_gpus_equal_stock(layout: dict[str, int]) -> None:
    for stock, _, pipelined in compare_with_stock(tiny_config(clip=0.3, **layout), 2):
        assert stock["clipped"] == STEPS
        assert pipelined["buckets"] > 2
