"""Finality policies by name: when does a bucket count as final?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from megastream.trainer.buckets import Bucket
from megastream.trainer.compat import UnsupportedTrainer
from megastream.trainer.stepper import OnFinal, PipelinedStepper, Stepper, WholeStepper

Finality = Literal["whole", "pipelined", "speculative", "early"]


def make_stepper(finality: Finality, optimizer: Any, buckets: Sequence[Bucket], on_final: OnFinal) -> Stepper:
    """The stepper of a policy; UnsupportedTrainer for one that this version does not have."""
    policies: dict[str, Callable[[Any, Sequence[Bucket], OnFinal], Stepper]] = {
        "whole": WholeStepper,
        "pipelined": PipelinedStepper,
    }
    if finality not in policies:
        known = "a reserved name" if finality in get_args(Finality) else "unknown"
        raise UnsupportedTrainer(f"finality policy {finality!r} is {known}; use {' or '.join(policies)}")
    return policies[finality](optimizer, buckets, on_final)
