"""From the name of a finality policy to the stepper that carries it out."""

from __future__ import annotations

from typing import get_args

import torch.distributed as dist

from megastream.trainer.abort_rate import AbortRate
from megastream.trainer.compat import UnsupportedTrainer
from megastream.trainer.compat_grads import refuse_streamed_gradients
from megastream.trainer.early import EarlyStepper
from megastream.trainer.policies import MAX_ABORT_RATE, Finality, clipping_refusal
from megastream.trainer.stepper import Listener, PipelinedStepper, Stepper, Trained, WholeStepper
from megastream.trainer.undo import Undo


def make_stepper(
    finality: Finality, trained: Trained, listener: Listener, *, max_abort_rate: float = MAX_ABORT_RATE
) -> Stepper:
    """The stepper of a policy. Every rank makes one, before the forward of its first step, and closes it at the end.

    UnsupportedTrainer names what the policy cannot be combined with, and the policy that can.
    """
    if finality not in get_args(Finality):
        raise UnsupportedTrainer(f"finality policy {finality!r} is unknown; use {', '.join(get_args(Finality))}")
    if reason := clipping_refusal(finality, trained.optimizer.config.clip_grad):
        raise UnsupportedTrainer(reason)
    if finality == "whole":
        return WholeStepper(trained, listener)
    if finality == "pipelined":
        return PipelinedStepper(trained, listener)
    refuse_streamed_gradients(trained.chunks, finality)
    undo = Undo() if finality == "speculative" else None
    rate = AbortRate(max_abort_rate, speaks=dist.get_rank() == 0)
    return EarlyStepper(trained, listener, undo=undo, rate=rate)
