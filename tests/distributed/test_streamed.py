"""What a stepper that takes over the reduction of gradients owes to those who wait for it, and to megatron's checks."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from megastream.trainer import model
from megastream.trainer.early import EarlyStepper
from megastream.trainer.stepper import Listener
from tests.helpers.ranks import run_ranks
from tests.helpers.steps import SkippedStep, forward_backward
from tests.helpers.tiny import tiny_config
from tests.helpers.training import adapter_of


def _checked_body(rank: int, world_size: int, init_method: str, config: Any, finality: Any, check: bool) -> Any:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, optimizer, adapter = adapter_of(config, finality)
    chunks[0].ddp_config.check_for_nan_in_grad = check
    step = SkippedStep(config, chunks, optimizer, adapter, finality, broken_rank=0)
    assert step.run(0.0).ok
    try:
        return step.run(math.nan).ok
    except RuntimeError as error:
        return str(error)


@pytest.mark.full
def test_megatrons_own_check_of_gradients_is_made() -> None:
    """`check_for_nan_in_grad` ends a training at its first gradient that is not finite, whoever reduces it."""
    config = tiny_config(layers=1)
    found = [
        run_ranks(_checked_body, 1, config=config, finality=finality, check=check)[0]
        for finality, check in (("pipelined", True), ("speculative", True), ("speculative", False))
    ]
    assert "found NaN in local grad norm for bucket #0" in found[0]
    assert "found NaN in local grad norm for bucket c0.dense0.b0." in found[1]
    assert found[2] is False


def _fewer_body(rank: int, world_size: int, init_method: str, config: Any) -> str:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    chunks, _, adapter = adapter_of(config, "early")
    stepper = adapter.stepper("early", Listener(lambda name: None))
    assert isinstance(stepper, EarlyStepper)
    forward_backward(config, chunks, 0)
    assert stepper.step().ok
    for group in list(_world.pg_map):  # megatron counts in minutes
        _set_pg_timeout(timedelta(seconds=4), group)
    if rank == 1:
        first = stepper._order._turns[0].params[0][0]
        arrived = stepper._order.arrived
        stepper._order.arrived = lambda param: iter(()) if param is first else arrived(param)  # type: ignore
    try:
        forward_backward(config, chunks, 1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_a_bucket_that_another_replica_never_hands_out_is_named() -> None:
    """Rank 0 waits inside its backward for the reduction, rank 1 inside its own for the experts of rank 0."""
    config = tiny_config(ep=2, layers=2, clip=0.0)
    waits, _ = run_ranks(_fewer_body, 2, config=config)
    assert re.match(r"rank 0: the gradients of bucket c0\.\w+\.b0\.\d+ were not reduced; .* fewer gradients", waits)
