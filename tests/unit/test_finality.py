"""Policies by name, the abort rate, and the order in which replicas hand out buckets."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megastream.trainer.abort_rate import AbortRate
from megastream.trainer.buckets import Bucket
from megastream.trainer.order import LateGradient, ReadyOrder
from megastream.trainer.policies import clipping_refusal, consequences


def test_every_policy_says_what_it_means() -> None:
    assert "undone, made again and sent again" in consequences("speculative", 1.0)
    said = consequences("speculative", 1.0, 0.25)
    assert "3 fp32 copies" in said and "from more than 4 clipped of the last 16 steps until at most 2 are" in said
    for finality in ("whole", "pipelined", "speculative", "early"):
        said = consequences(finality, 0.0)
        assert ("with more than two replicas" in said) == (finality in ("speculative", "early"))


@pytest.mark.parametrize("max_rate", [0.0, 0.1, 0.25, 0.3, 0.5, 1.0])
def test_what_is_said_of_the_rate_is_what_happens(max_rate: float) -> None:
    """The numbers in the line, not the rate, foretell with which count of clipped steps speculation ends and begins."""
    numbers = re.search(r"more than (\d+) clipped .* at most (\d+) are", consequences("speculative", 1.0, max_rate))
    assert numbers is not None
    most, least = map(int, numbers.groups())
    rate, speculates = AbortRate(max_rate), True
    steps = [True] * 16 + [False] * 16
    for index in range(len(steps)):
        rate.note(steps[index])
        clipped = sum(steps[max(0, index - 15) : index + 1])
        speculates = clipped <= (most if speculates else least)
        assert rate.speculating == speculates, clipped
    assert "no clipping" in consequences("early", 0.0) and "end the training" in consequences("early", 0.0)
    assert "clipping at 0.5" in consequences("whole", 0.5)


def test_early_names_the_policy_that_can_clip() -> None:
    assert "the clipping norm is 1: " in clipping_refusal("early", 1.0)
    assert "use 'speculative'" in clipping_refusal("early", 1.0)
    assert clipping_refusal("early", 0.0) == clipping_refusal("speculative", 1.0) == ""


def test_speculation_ends_above_the_rate_and_begins_again_below_half_of_it(caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    rate = AbortRate(0.25, speaks=True)
    said = []
    for clipped in [True] * 5 + [False] * 16 + [True] * 2:
        rate.note(clipped)
        said.append(rate.speculating)
    assert said[:5] == [True] * 4 + [False]
    assert said.index(True, 5) == 18, "when only two of the last sixteen were clipped"
    assert said[18:] == [True] * 5
    assert [record.getMessage() for record in caplog.records] == [
        "5 of the last 5 steps were clipped (max_abort_rate 0.25): speculative steps become pipelined ones until the "
        "rate has halved",
        "2 of the last 16 steps were clipped (max_abort_rate 0.25): speculative steps begin again",
    ]


def test_rates_at_the_ends() -> None:
    never, always = AbortRate(0.0), AbortRate(1.0)
    for _ in range(20):
        never.note(True)
        always.note(True)
    assert not never.speculating and always.speculating
    with pytest.raises(ValueError, match="max_abort_rate=1.5 is no share of steps"):
        AbortRate(1.5)


class _Weights:
    def __init__(self) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
        a, b, c, d = self.params
        buckets = (self._bucket("x", a, b), self._bucket("y", c), self._bucket("z", d))
        self.order = ReadyOrder(buckets, self._name)
        self.order.next_step()

    def _name(self, param: torch.nn.Parameter) -> str:
        return f"weight {[one is param for one in self.params].index(True)}"

    def _bucket(self, name: str, *params: torch.nn.Parameter) -> Bucket:
        data = torch.zeros(len(params))
        homes = tuple((param, index) for index, param in enumerate(params))
        return Bucket(name, data, homes, None, (), data, 1.0, dist.ReduceOp.SUM, False, 0)  # type: ignore[arg-type]

    def come(self, *indices: int) -> list[str]:
        return [bucket.name for index in indices for bucket in self.order.arrived(self.params[index])]

    def rest(self) -> list[str]:
        return [bucket.name for bucket in self.order.rest()]


def test_the_first_step_watches_and_the_next_ones_hand_out() -> None:
    weights = _Weights()
    assert weights.come(3, 1, 2, 0, 2) == []  # weight 2 comes twice
    assert weights.order.watched() == ("z", "x", "y")
    assert weights.rest() == ["x", "y", "z"]
    weights.order.agree(weights.order.watched())
    weights.order.next_step()
    assert weights.come(3) == ["z"]
    assert weights.come(1, 2) == []
    assert weights.come(2) == [], "complete, but x is before it"
    assert weights.come(0) == ["x", "y"]
    assert weights.rest() == []


def test_buckets_keep_the_agreed_order_of_another_rank() -> None:
    weights = _Weights()
    weights.come(0, 1, 2, 3)
    weights.order.agree(("z", "y", "x"))
    weights.order.next_step()
    assert weights.come(0, 1, 2) == []
    assert weights.rest() == ["z", "y", "x"]
    with pytest.raises(ValueError, match="ranks of one stage have different buckets: other, y"):
        weights.order.agree(("z", "other", "x"))


def test_a_gradient_that_comes_too_late_is_an_error() -> None:
    weights = _Weights()
    weights.come(0, 1, 2, 3)
    weights.order.agree(("x", "y", "z"))
    weights.order.next_step()
    assert weights.come(0, 1) == ["x"]
    with pytest.raises(
        LateGradient, match="a gradient of weight 1 came 2 times .* but 1 times .* bucket x .*pipelined"
    ):
        weights.come(1)
