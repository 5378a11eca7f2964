"""What checkpoints need of megatron-core's insides: optimizer shards, the planning of a save, random states.

As `compat`, written against 0.16.1 and 0.19.2; no other file touches these attributes.
"""

from __future__ import annotations

import inspect
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megastream.trainer import compat

METADATA = {"singleton_local_shards": True, "distrib_optim_sharding_type": "fully_reshardable"}
"""How megatron names what is saved: one key for each layer and expert. Stored, so that megatron itself reads it so."""


@dataclass(frozen=True)
class OptimizerShard:
    """What this rank holds of one parameter: elements [start, end) of it, flat, as fp32 tensors by megatron's names."""

    param: torch.nn.Parameter
    start: int
    end: int
    tensors: dict[str, torch.Tensor]


def optimizer_shards(optimizer: Any) -> Iterator[OptimizerShard]:
    """Every shard that this rank steps; the moments must exist (see `allocate_moments`)."""
    for shard in compat.main_shards(optimizer):
        span = shard.member._get_model_param_range_map(shard.param)["param"]
        state = shard.member.optimizer.state[shard.main]
        tensors = {"param": shard.main, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        yield OptimizerShard(shard.param, span.start, span.end, tensors)


def allocate_moments(optimizer: Any) -> None:
    """Gives every shard that was never stepped its moments, of zero, and a step count of 0; the masters stay.

    By megatron's own way, a step with gradients of zero; at a learning rate of zero it moves nothing.
    """
    for member in compat.members(optimizer):
        groups = member.optimizer.param_groups
        if all(_has_moments(member, main) for group in groups for main in group["params"]):
            continue
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        member._init_optimizer_states_with_dummy_values()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        _set_steps(member, 0)


def _has_moments(member: Any, main: torch.Tensor) -> bool:
    return main.numel() == 0 or "exp_avg" in member.optimizer.state.get(main, {})


def adam_steps(optimizer: Any) -> set[int]:
    """The step counts of all parameters of this rank: one number, or none when the rank owns nothing or never stepped.

    torch's AdamW counts in the state of each parameter, FusedAdam in the group.
    """
    counts = set()
    for shard in compat.main_shards(optimizer):
        state = shard.member.optimizer.state.get(shard.main, {})
        count = state.get("step", shard.group.get("step"))
        if count is not None:
            counts.add(int(count))
    return counts


def set_adam_steps(optimizer: Any, count: int) -> None:
    """The inverse of `adam_steps`, for parameters that have moments."""
    for member in compat.members(optimizer):
        _set_steps(member, count)


def _set_steps(member: Any, count: int) -> None:
    states = [state for state in member.optimizer.state.values() if "step" in state]
    for state in states:
        state["step"] = torch.tensor(float(count))
    if not states:  # FusedAdam, whose empty groups count too
        for group in member.optimizer.param_groups:
            group["step"] = count


def sharded_models(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """Megatron's own description of each chunk's tensors: what is saved under which key, at which place."""
    return [_model_in(chunk).sharded_state_dict(metadata=dict(METADATA)) for chunk in chunks]


def set_model(chunk: Any, state: dict[str, Any]) -> None:
    """Gives a chunk what `sharded_models` described of it."""
    _model_in(chunk).load_state_dict(state)


def _model_in(chunk: Any) -> Any:
    """The model without its wrappers, which would put a prefix before every key."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


class PlannedSave:
    """A save that all ranks have planned: `write` this rank's files on any thread, then `publish_index` together."""

    def __init__(self, request: Any, results: queue.Queue[Any]) -> None:
        self._request, self._results = request, results

    @property
    def files(self) -> list[Path]:
        """The files that this rank writes."""
        return [Path(bucket[0]) for bucket in self._buckets]

    @property
    def _buckets(self) -> list[Any]:
        return [] if self._request.async_fn is None else self._request.async_fn_args[1]

    def write(self) -> None:
        """Writes and syncs the files. RuntimeError says what went wrong; then there is nothing to publish."""
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        if self._request.async_fn is None:
            return
        transforms = self._request.async_fn.args[0]
        written: dict[int, Any] = {}
        for number, bucket in enumerate(self._buckets):
            done: queue.Queue[Any] = queue.Queue()
            turn: queue.Queue[Any] = queue.Queue()
            turn.put(number)
            FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, done, turn, True)
            _, written[number] = done.get_nowait()
            if isinstance(written[number], Exception):
                raise RuntimeError(f"{Path(bucket[0]).name}: {written[number]}") from written[number]
        self._results.put(written)

    def publish_index(self) -> None:
        """Writes the index of all files on rank 0. Collective; what fails there is raised behind the collectives."""
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        with _raised_behind((FileSystemWriterAsync, "finish"), (serialization, "save_config")):
            for finalize in self._request.finalize_fns:
                finalize()


@contextmanager
def _raised_behind(*alone: tuple[Any, str]) -> Iterator[None]:
    """An error in one of these functions, which rank 0 runs alone between collectives, is raised at the end.

    Raised where it happens it would leave the other ranks in a collective to which rank 0 never comes.
    """
    errors: list[BaseException] = []
    functions = [(owner, name, getattr(owner, name)) for owner, name in alone]
    for owner, name, function in functions:
        setattr(owner, name, _keeping(errors, function))
    try:
        yield
    finally:
        for owner, name, function in functions:
            setattr(owner, name, function)
    if errors:
        raise errors[0]


def _keeping(errors: list[BaseException], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except loading_errors() as error:
            errors.append(error)

    return call


def plan_save(state: dict[str, Any], folder: Path) -> PlannedSave:
    """Megatron's own planning of a torch_dist checkpoint, and the common part. Collective; the folder is empty.

    What fails on rank 0 alone (the common part cannot be written) is raised there behind the collectives.
    The tensors of `state` are read by `PlannedSave.write`: give copies, on the CPU. Megatron would hand them to
    processes and start one more to hear of them; they would outlive a killed trainer, so a thread writes here.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import state_dict_utils
    from megatron.core.dist_checkpointing.strategies import common, filesystem_async

    results: queue.Queue[Any] = queue.Queue()
    filesystem_async._results_queue = results
    known = inspect.signature(dist_checkpointing.save).parameters
    extra = {"async_strategy": "mcore"} if "async_strategy" in known else {}
    alone: list[tuple[Any, str]] = [(state_dict_utils, "validate_sharding_integrity")]
    if hasattr(common, "TorchCommonSaveStrategy"):  # later versions save the common part like tensors
        alone.append((common.TorchCommonSaveStrategy, "save_common"))
    with _raised_behind(*alone):
        request = dist_checkpointing.save(
            state, str(folder), async_sharded_save=True, content_metadata=dict(METADATA), **extra
        )
    return PlannedSave(request, results)


def load_into(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Reads what `state` describes, in place, and returns it with the common part. Collective."""
    from megatron.core import dist_checkpointing

    loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def loading_errors() -> tuple[type[BaseException], ...]:
    """What megatron and torch raise about a checkpoint that cannot be read or does not fit."""
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    return (CheckpointingException, CheckpointException, KeyError, RuntimeError, OSError, ValueError, AssertionError)


def random_states() -> dict[str, Any]:
    """Every generator that this rank's training draws from, as tensors."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states: dict[str, Any] = {"torch": torch.get_rng_state(), "tracker": {}}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
        states["tracker"] = dict(get_cuda_rng_tracker().get_states())
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """The inverse of `random_states`."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
        get_cuda_rng_tracker().set_states(states["tracker"])
