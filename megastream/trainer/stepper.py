"""Steppers: one optimizer step that says, bucket by bucket, when weights are final."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megastream.trainer import compat
from megastream.trainer.buckets import Bucket
from megastream.trainer.not_finite import name_not_finite
from megastream.trainer.router_bias import BUFFER, RouterBiases
from megastream.trainer.split import Norm, SplitStep

OnFinal = Callable[[str], None]
"""Called with a bucket's name, on the training thread, once its bytes are final on this rank. Must return at once."""

SKIPPED = "the step is skipped, weights and moments stay as they were"


def _nothing() -> None: ...


@dataclass(frozen=True)
class Listener:
    """Who is told of a step; all calls come on the thread that trains (for CUDA models also on autograd's).

    `opens` once per step, before the first weight of it changes: it may wait for whoever still reads the old ones.
    `final` for each bucket. `withdrawn` when what was final in this step is not: the weights will change again, and
    buckets of a step that counts become final anew. The first is the one that a caller cannot do without.
    """

    final: OnFinal
    opens: Callable[[], None] = _nothing
    withdrawn: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Trained:
    """What a stepper steps on one rank: DDP chunks, their chained optimizer, its buckets, and names for messages.

    With `slices` a bucket counts as final as soon as the part that this rank owns is, before it is gathered. `biases`
    of routers are no optimizer's and in no bucket.
    """

    chunks: Sequence[Any]
    optimizer: Any
    buckets: Sequence[Bucket]
    name_of: Callable[[torch.nn.Parameter], str] = lambda param: f"a parameter of shape {tuple(param.shape)}"
    slices: bool = False
    biases: RouterBiases | None = None

    def counts(self, final: OnFinal) -> None:
        """This step counts: what no optimizer steps is final, as `finalize_model_grads` has left it.

        Every stepper calls it once it knows, for a step that is skipped never, and behind `opens`.
        """
        if self.biases is not None:
            self.biases.take()
            final(BUFFER)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`ok`: the step counts, and every bucket was reported final. Equal on all ranks, like `grad_norm` (unclipped)."""

    ok: bool
    grad_norm: float


class Stepper(Protocol):
    """Takes the place of `optimizer.step()`: called on every rank, after the gradients are reduced. Blocks."""

    def step(self) -> StepResult: ...

    def close(self) -> None:
        """Leaves megatron as it was found. Idempotent."""


class WholeStepper:
    """Stock `optimizer.step()`, then every bucket is final: what every other system does.

    The norm, Megatron's own, is looked at before the step, not behind it. So when it is not finite the step is skipped
    as under `pipelined`; stock, without Megatron's own check for NaN, would write it into weights and moments.
    """

    def __init__(self, trained: Trained, listener: Listener) -> None:
        self._trained, self._listener = trained, listener

    def step(self) -> StepResult:
        compat.install()
        self._listener.opens()
        norm = grad_norm(self._trained.optimizer)
        if not math.isfinite(norm):
            name_not_finite(self._trained.buckets, self._trained.name_of, SKIPPED)
            return StepResult(False, float(norm))
        compat.stock_step(self._trained.optimizer, norm)
        self._trained.counts(self._listener.final)
        for bucket in self._trained.buckets:
            self._listener.final(bucket.name)
        return StepResult(True, float(norm))

    def close(self) -> None: ...


class PipelinedStepper:
    """The norm first, then bucket by bucket: clip, step, copy, gather; bucket i is final while i+1 is stepped.

    Weights, moments, norm and losses equal stock's bit for bit: all that is done per bucket is elementwise. When the
    norm is not finite no weight and no moment is touched.
    """

    def __init__(self, trained: Trained, listener: Listener) -> None:
        self._trained, self._listener = trained, listener

    @torch.no_grad()
    def step(self) -> StepResult:
        compat.install()
        self._listener.opens()
        norm = grad_norm(self._trained.optimizer)
        if not math.isfinite(norm):
            name_not_finite(self._trained.buckets, self._trained.name_of, SKIPPED)
            return StepResult(False, float(norm))
        self._trained.counts(self._listener.final)
        split = SplitStep(self._trained.optimizer)
        step_with_norm(self._trained.buckets, norm, split, self._listener.final, self._trained.slices)
        split.finish()
        return StepResult(True, float(norm))

    def close(self) -> None: ...


def grad_norm(optimizer: Any) -> Norm:
    """Megatron's own global norm over the reduced gradients, NaN when it says that they are not finite. Collective."""
    if optimizer.prepare_grads():
        return math.nan
    norm: Norm = optimizer.get_grad_norm()
    return norm


def step_with_norm(buckets: Sequence[Bucket], norm: Norm, split: SplitStep, final: OnFinal, slices: bool) -> None:
    """Clips and steps these buckets in turn, and says which are final. All ranks of a bucket's group call it; blocks.

    While one bucket is stepped the one before it is gathered.
    """
    in_flight: list[dist.Work] = []
    before = ""
    for bucket in buckets:
        bucket.update(norm, split)
        if slices:
            final(bucket.name)
        gathering = bucket.gather()
        _finish(before, in_flight, final, slices)
        before, in_flight = bucket.name, gathering
    _finish(before, in_flight, final, slices)


def _finish(name: str, gathering: list[dist.Work], final: OnFinal, slices: bool) -> None:
    for work in gathering:
        work.wait()
    if name and not slices:
        final(name)
