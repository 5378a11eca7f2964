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

OnFinal = Callable[[str], None]
"""Called with a bucket's name, on the training thread, once its bytes are final on this rank. Must return at once."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """`ok`: the step counts, and every bucket was reported final. Equal on all ranks, like `grad_norm` (unclipped)."""

    ok: bool
    grad_norm: float


class Stepper(Protocol):
    """Takes the place of `optimizer.step()`: called on every rank, after the gradients are reduced. Blocks."""

    def step(self) -> StepResult: ...


class WholeStepper:
    """Stock `optimizer.step()`, then every bucket is final: what every other system does.

    Stock steps with gradients that are not finite, too; such a step is not ok and reports no bucket.
    """

    def __init__(self, optimizer: Any, buckets: Sequence[Bucket], on_final: OnFinal) -> None:
        self._optimizer, self._buckets, self._on_final = optimizer, buckets, on_final

    def step(self) -> StepResult:
        compat.install()
        ok, norm, _ = self._optimizer.step()
        if not ok or not math.isfinite(norm):
            return StepResult(False, math.nan if norm is None else float(norm))
        for bucket in self._buckets:
            self._on_final(bucket.name)
        return StepResult(True, float(norm))


class PipelinedStepper:
    """The norm first, then bucket by bucket: clip, step, copy, gather; bucket i is final while i+1 is stepped.

    Weights, moments, norm and losses equal stock's bit for bit: all that is done per bucket is elementwise. When the
    norm is not finite no weight and no moment is touched.
    """

    def __init__(self, optimizer: Any, buckets: Sequence[Bucket], on_final: OnFinal) -> None:
        self._optimizer, self._buckets, self._on_final = optimizer, buckets, on_final

    @torch.no_grad()
    def step(self) -> StepResult:
        compat.install()
        if self._optimizer.prepare_grads():
            return StepResult(False, math.nan)
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return StepResult(False, norm)
        self._step_buckets(norm)
        return StepResult(True, norm)

    def _step_buckets(self, norm: float) -> None:
        split = compat.SplitStep(self._optimizer)
        in_flight: tuple[Bucket, list[dist.Work]] | None = None
        for bucket in self._buckets:
            bucket.update(norm, split)
            gathering = bucket.gather()
            if in_flight is not None:
                self._finish(*in_flight)
            in_flight = bucket, gathering
        if in_flight is not None:
            self._finish(*in_flight)
        split.finish()

    def _finish(self, bucket: Bucket, gathering: list[dist.Work]) -> None:
        for work in gathering:
            work.wait()
        self._on_final(bucket.name)
