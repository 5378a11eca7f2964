"""Gradients that are not finite: what is said of them, and that `whole` does not take the stock step with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist

from megastream.trainer import compat, not_finite, stepper
from megastream.trainer.stepper import Listener, StepResult, Trained, WholeStepper


class Optimizer:
    """Counts what megatron's does: a norm and a step, which takes the norm of whoever knows it."""

    def __init__(self, norm: float, *, overflows: bool = False, skips: bool = False) -> None:
        self.norm, self.overflows, self.skips = norm, overflows, skips
        self.norms = 0
        self.stepped_with: list[float] = []

    def prepare_grads(self) -> bool:
        return self.overflows

    def get_grad_norm(self) -> float:
        self.norms += 1
        return self.norm

    def step(self) -> tuple[bool, float, None]:
        self.stepped_with.append(self.get_grad_norm())
        return not self.skips, self.norm, None


class Bucket:
    name = "b"


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(compat, "install", lambda: "cpu")
    monkeypatch.setattr(stepper, "name_not_finite", lambda buckets, name_of, then: said.append(then))
    return said


def step(optimizer: Optimizer, heard: list[str]) -> StepResult:
    buckets: Any = [Bucket()]
    return WholeStepper(Trained([], optimizer, buckets), Listener(heard.append, lambda: heard.append("opens"))).step()


@pytest.mark.parametrize("optimizer", [Optimizer(math.nan), Optimizer(math.inf), Optimizer(1.0, overflows=True)])
def test_a_norm_that_is_not_finite_skips_the_step(optimizer: Optimizer, heard: list[str]) -> None:
    """Stock writes it into weights and moments; every step behind it is lost, and so are the checkpoints."""
    result = step(optimizer, heard)
    assert not result.ok and not math.isfinite(result.grad_norm)
    assert optimizer.stepped_with == []
    assert heard == ["opens", stepper.SKIPPED], "nothing is final"


def test_any_other_step_is_megatron_s_own_with_one_norm(heard: list[str]) -> None:
    optimizer = Optimizer(0.5)
    assert step(optimizer, heard) == StepResult(True, 0.5)
    assert optimizer.stepped_with == [0.5] and optimizer.norms == 1 and heard == ["opens", "b"]
    optimizer.norm = 0.75
    assert step(optimizer, heard).grad_norm == 0.75, "its own norm is in its place again"


def test_a_step_that_megatron_skips_for_reasons_of_its_own_ends_the_training(heard: list[str]) -> None:
    with pytest.raises(compat.UnsupportedTrainer, match=r"megatron skips a step at a gradient norm of 0.5"):
        step(Optimizer(0.5, skips=True), heard)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_logs_a_skipped_step_and_nobody_an_error_that_is_raised(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever raises says it: with a line of the log beside it rank 0 would say it twice."""

    def gather(found: list[Any], mine: Any) -> None:
        found[:] = [[], ["c0.dense0.b1 (w)"]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    line = "gradients are not finite in c0.dense0.b1 (w) on rank 1"
    assert not_finite.not_finite([], str) == line and not caplog.messages
    not_finite.name_not_finite([], str, "the step is skipped")
    assert caplog.messages == ([f"{line}; the step is skipped"] if rank == 0 else [])
