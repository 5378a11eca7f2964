"""From the name of a finality policy to the stepper that carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch.distributed as dist

from megastream.trainer.abort_rate import AbortRate
from megastream.trainer.compat import UnsupportedTrainer
from megastream.trainer.compat_grads import refuse_streamed_gradients
from megastream.trainer.early import EarlyStepper
from megastream.trainer.policies import MAX_ABORT_RATE, Finality, clipping_refusal, is_streamed
from megastream.trainer.stepper import Listener, PipelinedStepper, Stepper, Trained, WholeStepper
from megastream.trainer.undo import Undo


def refuse_finality(finality: Finality, chunks: Sequence[Any], optimizer: Any) -> None:
    """UnsupportedTrainer names what the policy cannot be combined with, and the policy that can. No communication."""
    if finality not in get_args(Finality):
        raise UnsupportedTrainer(f"finality policy {finality!r} is unknown; use {', '.join(get_args(Finality))}")
    if reason := clipping_refusal(finality, optimizer.config.clip_grad):
        raise UnsupportedTrainer(reason)
    if is_streamed(finality):
        refuse_streamed_gradients(chunks, finality)


def make_stepper(
    finality: Finality, trained: Trained, listener: Listener, *, max_abort_rate: float = MAX_ABORT_RATE
) -> Stepper:
    """The stepper of a policy. Every rank makes one, before the forward of its first step, and closes it at the end.

    For `speculative` and `early` the buckets must have been cut for them: late parameters in buckets of their own.
    Refuses like `refuse_finality`.
    """
    refuse_finality(finality, trained.chunks, trained.optimizer)
    if finality == "whole":
        return WholeStepper(trained, listener)
    if finality == "pipelined":
        return PipelinedStepper(trained, listener)
    undo = Undo() if finality == "speculative" else None
    rate = AbortRate(max_abort_rate, speaks=dist.get_rank() == 0)
    return EarlyStepper(trained, listener, undo=undo, rate=rate)
