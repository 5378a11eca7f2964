"""Steps inside the backward: a bucket is final as soon as its own gradients are, long before the global norm.

Stage 0 (and every stage on CUDA, on a stream of its own) steps a bucket while the rest of its backward runs. On a CPU
the other stages, unless they are virtual ones, step theirs right behind their last backward: earlier they would delay
the stage that waits for them, and until stage 0 is done they have nothing else to do.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megastream.trainer import compat
from megastream.trainer.abort_rate import AbortRate
from megastream.trainer.agreement import AgreedError
from megastream.trainer.buckets import Bucket, in_turns
from megastream.trainer.compat_grads import GradTakeover, check_local_grads
from megastream.trainer.not_finite import name_not_finite, not_finite
from megastream.trainer.order import ReadyOrder
from megastream.trainer.split import Norm, SplitStep, clip_coefficient, refuse_changed, settings_of
from megastream.trainer.stepper import SKIPPED, Listener, StepResult, Trained, grad_norm, step_with_norm
from megastream.trainer.undo import Undo


class DamagedWeights(AgreedError):
    """Buckets were stepped in a step that must not count, and nothing was kept to take them back to."""


class EarlyStepper:
    """`early` (without `undo`) and `speculative`: made before the first forward, `close` gives megatron its hooks back.

    Weights, moments, norm and losses equal stock's bit for bit where a bucket's group has at most two replicas, with
    more up to the order in which they are summed. A step is made as if the norm stayed under the clipping
    norm, for stock then leaves gradients alone; when it turns out larger, the step is undone and made again with the
    clipped gradients. With `early` there is no clipping, so that only gradients that are not finite stand against it:
    they end the training with DamagedWeights, where `speculative` skips the step.

    The first step only learns the order of gradients, and steps behind the backward. Buckets whose gradients
    finalize_model_grads still changes are stepped after the norm, and so are all while `rate` says that speculation
    does not pay.

    Learning rate, weight decay, betas and eps are taken as they are during the backward, so a loop sets them before the
    forward; RuntimeError in `step` names one that was changed since.
    """

    def __init__(self, trained: Trained, listener: Listener, *, undo: Undo | None, rate: AbortRate) -> None:
        from megatron.core import parallel_state as mesh

        self._trained, self._listener, self.undo, self.rate = trained, listener, undo, rate
        self._clip = float(trained.optimizer.config.clip_grad)
        self._on_cuda = any(bucket.data.is_cuda for bucket in trained.buckets)
        self._side = torch.cuda.Stream() if self._on_cuda else None
        self._stage = mesh.get_pipeline_model_parallel_rank()
        self._in_backward = self._on_cuda or self._stage == 0 or len(trained.chunks) > 1
        self._order = ReadyOrder(trained.buckets, trained.name_of)
        self.aborts = 0
        self._begin()
        self._takeover = GradTakeover(trained.chunks, self._on_grad, self._on_finish)

    def close(self) -> None:
        self._takeover.release()

    # ---- during forward and backward -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Nothing of the next step has happened yet."""
        self._split: SplitStep | None = None
        self._reducing: dict[str, list[dist.Work]] = {}
        self._waiting: deque[Bucket] = deque()
        self._gathering: deque[tuple[Bucket, list[dist.Work]]] = deque()
        self._stepped: list[Bucket] = []
        self._settings: list[dict[str, Any]] = []
        self._order.next_step()

    def _on_grad(self, param: torch.nn.Parameter) -> None:
        for bucket in self._order.arrived(param):
            self._complete(bucket)

    @torch.no_grad()
    def _complete(self, bucket: Bucket) -> None:
        """The bucket's local gradients are all there. What is issued here, and when, is the same on all replicas."""
        with self._beside():
            check_local_grads(self._trained.chunks, bucket.name, bucket.grads)
            self._reducing[bucket.name] = bucket.reduce()
            if bucket.late or not self.rate.speculating:
                return
            self._waiting.append(bucket)
            while self._in_backward and len(self._waiting) > 1:
                self._step_early(self._waiting.popleft())

    @torch.no_grad()
    def _on_finish(self) -> None:
        """This rank's backward is over; others may still be at theirs."""
        if self.rate.speculating and not self._settings:  # a rank with late buckets only notices a change with the rest
            self._settings = settings_of(self._trained.optimizer)
        for bucket in self._order.rest():
            self._complete(bucket)
        with self._beside():
            left = self._waiting if self._in_backward else in_turns(self._waiting)
            for bucket in left:
                self._step_early(bucket)
            self._waiting.clear()
            for bucket in self._trained.buckets:
                if bucket.late:  # finalize_model_grads reads and writes these next
                    self._wait_reduced(bucket)
        self._join()

    def _step_early(self, bucket: Bucket) -> None:
        if self._split is None:
            self._open()
        if bucket.shards:
            self._wait_reduced(bucket)
        bucket.load_grads()
        if self.undo is not None:
            self.undo.save(shard for shard, _, _ in bucket.shards)
        assert self._split is not None
        bucket.update(None, self._split)
        self._stepped.append(bucket)
        if self._trained.slices:
            self._listener.final(bucket.name)
        self._gathering.append((bucket, bucket.gather()))
        self._say_final(only_arrived=True)

    def _open(self) -> None:
        self._split = SplitStep(self._trained.optimizer)
        self._settings = self._settings or settings_of(self._trained.optimizer)
        self._listener.opens()

    def _wait_reduced(self, bucket: Bucket) -> None:
        try:
            _wait(self._reducing[bucket.name])
        except RuntimeError as error:  # what torch.distributed raises for a lost peer and for a deadline
            raise RuntimeError(
                f"rank {dist.get_rank()}: the gradients of bucket {bucket.name} were not reduced; another replica has "
                f"ended, or got fewer gradients of it in this backward than in the first step: {error}"
            ) from error

    def _say_final(self, *, only_arrived: bool) -> None:
        """Reports buckets that are gathered, oldest first. On CUDA waiting costs the host nothing."""
        while self._gathering:
            bucket, works = self._gathering[0]
            if only_arrived and not self._on_cuda and not all(work.is_completed() for work in works):
                return
            self._gathering.popleft()
            _wait(works)
            if not self._trained.slices:
                self._listener.final(bucket.name)

    # ---- in place of optimizer.step() ----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> StepResult:
        compat.install()
        if not self._takeover.finished:
            raise RuntimeError(
                "step before the gradients of a step: finalize_model_grads was not called since the last"
            )
        with self._beside():
            self._say_final(only_arrived=False)
            for bucket in self._trained.buckets:
                self._wait_reduced(bucket)
        self._join()
        if self._split is None:
            self._open()
        refuse_changed(self._settings, self._trained.optimizer)
        norm = grad_norm(self._trained.optimizer)
        if not math.isfinite(norm):
            self._skip()
        else:
            self._decide(norm)
        if not self._order.agreed:
            self._agree()
        self._begin()
        self._takeover.next_step()
        return StepResult(math.isfinite(norm), float(norm))

    def _decide(self, norm: Norm) -> None:
        """Undoes what was stepped too far, steps what is left, and makes the step count."""
        clips = self._clip > 0.0 and bool(clip_coefficient(self._clip, norm) < 1.0)
        if clips and self.rate.speculating:  # equal on all ranks, unlike what this one stepped: so are attempts
            self.aborts += 1
            self._take_back()
            self._split = SplitStep(self._trained.optimizer)
        self._trained.counts(self._listener.final)
        early = {bucket.name for bucket in self._stepped}
        left = [bucket for bucket in self._trained.buckets if bucket.name not in early]
        assert self._split is not None
        step_with_norm(in_turns(left), norm, self._split, self._listener.final, self._trained.slices)
        self._split.finish()
        if self.undo is not None:
            self.undo.forget()
        self.rate.note(clips)

    def _take_back(self) -> None:
        """This rank's shards are as they were; the weights that were copied from them are not yet."""
        assert self.undo is not None, "a step without clipping is never taken back"
        self._listener.withdrawn()
        self.undo.restore()
        self._stepped = []

    def _skip(self) -> None:
        trained, stepped = self._trained, self._stepped
        if self.undo is None:  # on a rank that stepped nothing, too: others did
            raise DamagedWeights(
                f"{not_finite(trained.buckets, trained.name_of)}; other buckets were stepped before, and finality "
                f"'early' keeps nothing to go back to: load the last checkpoint, or use 'speculative', which skips "
                f"such a step"
            )
        name_not_finite(trained.buckets, trained.name_of, SKIPPED)
        if self.rate.speculating:
            self._take_back()
        for bucket in stepped:
            bucket.store()
            _wait(bucket.gather())

    def _agree(self) -> None:
        """All ranks of a stage take the order of its first rank. Once, after the first step; collective, blocking."""
        orders: list[tuple[int, tuple[str, ...]]] = [(-1, ())] * dist.get_world_size()
        dist.all_gather_object(orders, (self._stage, self._order.watched()))
        self._order.agree(next(names for stage, names in orders if stage == self._stage))

    # ---- streams -------------------------------------------------------------------------------------------------

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On CUDA: work goes to the side stream, behind what the current stream was given so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
