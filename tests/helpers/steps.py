"""Trains the tiny model with one finality policy after the other, and says what came out, bit by bit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megastream.trainer import adapter as adapter_file
from megastream.trainer import compat, model
from megastream.trainer.abort_rate import AbortRate
from megastream.trainer.adapter import MegatronAdapter, mesh_coords
from megastream.trainer.buckets import Bucket
from megastream.trainer.config import TrainerConfig
from megastream.trainer.early import EarlyStepper
from megastream.trainer.router_bias import BUFFER
from megastream.trainer.stepper import Listener
from megastream.trainer.undo import Undo
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import BATCH, MICROBATCHES, SEQUENCE, batches
from tests.helpers.training import adapter_of, digest, outcome, parameters, router_biases, set_rate, update

STEPS = 20
ALL = ("whole", "pipelined", "early", "speculative")

CLIPS = ("sometimes", "always", "never")
"""Which steps are clipped. With `sometimes` about half are, so that undone and kept steps follow each other."""


@dataclass(frozen=True)
class Run:
    """`exact_sums`: gradients lie on a grid, so that a sum over replicas has the same bits in any order.

    `turns`: speculation ends and begins again every so many steps, whatever is clipped.
    """

    finality: str
    broken: str = ""
    exact_sums: bool = False
    max_abort_rate: float = 1.0
    turns: int = 0


def compare(
    config: TrainerConfig,
    world_size: int,
    policies: tuple[str | Run, ...],
    *,
    exact_sums: bool = False,
    ddp: Mapping[str, Any] | None = None,
) -> list[list[dict[str, Any]]]:
    """Runs stock and each policy; all must be equal to stock on every rank. Results by rank, then by run.

    `ddp` are settings of megatron's DistributedDataParallelConfig, for all of them.
    """
    runs = tuple(p if isinstance(p, Run) else Run(p, exact_sums=exact_sums) for p in ("stock", *policies))
    results = train_all(config, world_size, runs, ddp)
    for rank, (stock, *others) in enumerate(results):
        assert stock["unmoved"] == 0
        for other in others:
            assert other["in order"], other["finality"]
            for key in ("trace", "params", "moments", "masters", "group steps", "biases", "sent biases"):
                assert stock[key] == other[key], f"rank {rank}: {key} of {other['finality']}"
    return results


def train_all(
    config: TrainerConfig, world_size: int, runs: tuple[Run, ...], ddp: Mapping[str, Any] | None = None
) -> list[list[dict[str, Any]]]:
    timeout_s = 400 if world_size > torch.cuda.device_count() > 0 else 150  # ranks that share a GPU take turns
    return run_ranks(_body, world_size, config=config, runs=runs, ddp=dict(ddp or {}), timeout_s=timeout_s)


def in_turn(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each layout with one of CLIPS. All pairs of settings stand in tests/distributed/test_matrix.py."""
    return [(name, CLIPS[index % len(CLIPS)]) for index, name in enumerate(names)]


def compare_clipped(make: Callable[[float], TrainerConfig], world_size: int, clip: str) -> list[list[dict[str, Any]]]:
    """`compare` of one of CLIPS; `make` gives the config with a clipping norm, 0 for none."""
    if clip == "never":
        return compare(make(0.0), world_size, ("pipelined", "early", "speculative"))
    limit = 0.3 if clip == "always" else mixed_clip(make(0.0), world_size)
    return compare(make(limit), world_size, ("pipelined", "speculative"))


def mixed_clip(config: TrainerConfig, world_size: int) -> float:
    """A clipping norm between the norms of an unclipped training."""
    trace = train_all(config, world_size, (Run("stock"),))[0][0]["trace"]
    norms = sorted(norm for _, norm in trace)
    return (norms[len(norms) // 2 - 1] + norms[len(norms) // 2]) / 2


def _body(
    rank: int, world_size: int, init_method: str, config: TrainerConfig, runs: tuple[Run, ...], ddp: dict[str, Any]
) -> list[dict[str, Any]]:
    model.start_process_group(config, rank=rank, world_size=world_size, init_method=init_method, deadline_s=60)
    from megatron.core import distributed

    honest = distributed.DistributedDataParallelConfig
    distributed.DistributedDataParallelConfig = lambda **named: honest(**{**named, **ddp})
    return [_train(config, run) for run in runs]


def _train(config: TrainerConfig, run: Run) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]), _Broken(run.broken):
        chunks, optimizer, adapter = adapter_of(config, run.finality)
        params = parameters(chunks)
        if run.exact_sums:
            for param in params:
                param.register_hook(_on_a_grid)
        if run.broken == "skip one bucket":
            adapter._buckets[0].shards.clear()
        before = [p.detach().clone() for p in params]
        told = _Told()
        stepper = None
        if run.finality != "stock":
            rate = run.max_abort_rate
            stepper = adapter.stepper(run.finality, told.listener, max_abort_rate=rate)  # type: ignore[arg-type]
        if run.turns and isinstance(stepper, EarlyStepper):
            stepper.rate = _InTurns(run.turns)
        if run.broken == "bias before finalize":
            _take_before_finalize(chunks[0].config, adapter)
        trace, sent = [], []
        for step in range(STEPS):
            trace.append(_step(config, chunks, optimizer, stepper, told, step))
            sent.append(digest(data for name, data in adapter.buffers.items() if name == BUFFER))
        if stepper is not None:
            stepper.close()
    return {
        **outcome(params, before, optimizer),
        "finality": run.finality,
        "ddp": vars(chunks[0].ddp_config),
        "trace": trace,
        "biases": digest(router_biases(chunks)),
        "sent biases": sent,
        "buckets": len(adapter._buckets),
        "late": sum(bucket.late for bucket in adapter._buckets),
        "early": told.early,
        "withdrawn": told.withdrawn,
        "in order": told.steps == [sorted(adapter.buffers)] * STEPS,
        "clipped": sum(norm > config.clip > 0 for _, norm in trace),
        "aborts": stepper.aborts if isinstance(stepper, EarlyStepper) else 0,
    }


class _InTurns(AbortRate):
    def __init__(self, steps: int) -> None:
        super().__init__(1.0)
        self._steps, self._count = steps, 0

    def note(self, clipped: bool) -> None:
        self._count += 1
        self.speculating = self._count // self._steps % 2 == 0


class _Told:
    """What a listener hears: per step the buckets that stayed final; `early` of the last step before its end."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.open: list[str] = []
        self.early = self.withdrawn = 0
        self.listener = Listener(lambda name: self.open.append(name), self._opens, self._withdraw)

    def _opens(self) -> None:
        assert not self.open

    def _withdraw(self) -> None:
        self.withdrawn += 1
        self.open.clear()

    def close_step(self) -> None:
        self.steps.append(sorted(self.open))
        self.open.clear()


def _step(
    config: TrainerConfig, chunks: list[Any], optimizer: Any, stepper: Any, told: _Told, step: int
) -> tuple[float | None, float]:
    set_rate(config, optimizer, step)
    loss = forward_backward(config, chunks, step)
    if isinstance(stepper, EarlyStepper):
        told.early = len(stepper._stepped)
    norm = update(optimizer, stepper)
    told.close_step()
    return loss, norm


def forward_backward(config: TrainerConfig, chunks: list[Any], step: int) -> float | None:
    return model.train_step(
        chunks,
        batches(config, step, mesh_coords()["dp"]),
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )


def _take_before_finalize(transformer: Any, adapter: MegatronAdapter) -> None:
    """What leaves of the routers' biases is what they were before megatron changed them in this step."""
    finalize, biases = transformer.finalize_model_grads_func, adapter._biases
    if biases is None:
        return
    take = biases.take

    def too_early(*args: Any, **named: Any) -> None:
        take()
        finalize(*args, **named)

    transformer.finalize_model_grads_func = too_early
    biases.take = lambda: None  # type: ignore[method-assign]


def _on_a_grid(grad: torch.Tensor) -> torch.Tensor:
    """Multiples of 2^-14 below 2^6: any few of them add up without rounding in fp32, and halving keeps that so."""
    return (grad.float().clamp(-60, 60) * 2**14).round().div(2**14).to(grad.dtype)


class _Broken:
    """Leaves out, for one run, what must not be left out."""

    def __init__(self, what: str) -> None:
        self._patches: list[tuple[Any, str, Any]] = []
        reduce = Bucket.reduce

        def twice(bucket: Bucket) -> Any:
            for work in reduce(bucket):
                work.wait()
            return reduce(bucket)

        table = {
            "reduce twice": (Bucket, "reduce", twice),
            "no undo": (Undo, "restore", lambda self: None),
            "nothing is late": (adapter_file, "late_params", lambda chunks: set()),
        }
        self._what = table.get(what)

    def __enter__(self) -> None:
        if self._what is not None:
            owner, name, value = self._what
            self._patches.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def __exit__(self, *error: Any) -> None:
        for owner, name, value in self._patches:
            setattr(owner, name, value)


@dataclass(frozen=True)
class Skipped:
    ok: bool
    norm: float
    changed: bool
    final: int
    withdrawn: int
    log: str


class SkippedStep:
    """Steps of a real training in which one rank's gradient of one weight can be spoilt."""

    def __init__(
        self,
        config: TrainerConfig,
        chunks: list[Any],
        optimizer: Any,
        adapter: MegatronAdapter,
        finality: str,
        broken_rank: int,
    ) -> None:
        self._chunks, self._optimizer, self._told = chunks, optimizer, _Told()
        self._config = config
        self._stepper = adapter.stepper(finality, self._told.listener, max_abort_rate=1.0)  # type: ignore[arg-type]
        self._poison, self._count = 0.0, 0
        self._lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self._lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("megastream.trainer.not_finite").addHandler(handler)
        if torch.distributed.get_rank() == broken_rank:
            # The embedding is the last to get its gradient: other buckets were stepped before it shows.
            weight = next(p for n, p in chunks[0].named_parameters() if "word_embeddings" in n or "output_layer" in n)
            weight.register_hook(lambda grad: grad + self._poison)

    def run(self, poison: float) -> Skipped:
        self._poison, self._count = poison, self._count + 1
        self._lines.clear()
        before, withdrawn = self._state(), self._told.withdrawn
        forward_backward(self._config, self._chunks, self._count)
        result = self._stepper.step()
        self._told.close_step()
        return Skipped(
            result.ok,
            result.grad_norm,
            self._state() != before,
            len(self._told.steps[-1]),
            self._told.withdrawn - withdrawn,
            " ".join(self._lines),
        )

    def _state(self) -> str:
        shards = list(compat.main_shards(self._optimizer))
        states = [shard.member.optimizer.state.get(shard.main, {}) for shard in shards]
        moments = [state[key] for state in states for key in sorted(state) if torch.is_tensor(state[key])]
        params = parameters(self._chunks)
        return digest([*params, *(shard.main for shard in shards), *moments])
