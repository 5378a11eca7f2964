"""The optimizer step taken part by part: clipping and stepping a subset of this rank's shards."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import torch

from megastream.trainer.compat import MainShard, members

_SETTINGS = ("lr", "weight_decay", "betas", "eps")


Norm: TypeAlias = "float | torch.Tensor"
"""A gradient norm as megatron gives it: with TransformerEngine (from 0.19 on) an fp32 scalar on the GPU, not a float.

What is divided by it must stay of that type: rounded in fp64, clipped gradients differ from stock's in the last bit.
"""


def clip_coefficient(max_norm: float, norm: Norm) -> Norm:
    """What gradients are multiplied with where it is below 1, from `clip_grad_by_total_norm_fp32`."""
    return max_norm / (norm + 1.0e-6)


def clip(member: Any, mains: list[torch.Tensor], norm: Norm) -> None:
    """Scales the gradients of these masters in place, as `ChainedOptimizer.step` does for all of the member's."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    if member.config.clip_grad > 0.0:
        clip_grad_by_total_norm_fp32(mains, max_norm=member.config.clip_grad, total_norm=norm)


class SplitStep:
    """One step of the inner optimizers, taken subset by subset. Adam is elementwise, so the split changes no bit.

    TransformerEngine's and apex's FusedAdam count `step` in the group: every subset starts from the group's own value,
    and `finish` writes the advanced value back once. torch's AdamW counts per parameter.
    """

    def __init__(self, optimizer: Any) -> None:
        self._members = members(optimizer)
        self._advanced: dict[int, dict[str, Any]] = {}

    def step(self, member: Any, shards: Sequence[MainShard]) -> None:
        """Steps these shards of one member; their gradients are in `main.grad`."""
        subsets: dict[int, dict[str, Any]] = {}
        for shard in shards:
            subset = subsets.setdefault(id(shard.group), {**shard.group, "params": []})
            subset["params"].append(shard.main)
        _step_groups(member.optimizer, list(subsets.values()))
        self._advanced.update(subsets)

    def finish(self) -> None:
        """Brings the groups to where a stock step leaves them; one that is empty on this rank is stepped as it is."""
        for member in self._members:
            for group in member.optimizer.param_groups:
                advanced = self._advanced.get(id(group))
                if advanced is None:
                    advanced = {**group, "params": []}
                    _step_groups(member.optimizer, [advanced])
                group.update({key: value for key, value in advanced.items() if key != "params"})


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """Copies of what a training loop may set in the groups of the inner optimizers, one entry per group."""
    groups = (group for member in members(optimizer) for group in member.optimizer.param_groups)
    return [{name: deepcopy(group[name]) for name in _SETTINGS if name in group} for group in groups]


def refuse_changed(before: list[dict[str, Any]], optimizer: Any) -> None:
    """RuntimeError names the first setting that is not what it was, in a step whose buckets were stepped with it."""
    for index, (old, new) in enumerate(zip(before, settings_of(optimizer), strict=True)):
        for name, value in old.items():
            if new.get(name) != value:
                raise RuntimeError(
                    f"{name} of parameter group {index} was {value} in the backward and is {new.get(name)} in step(), "
                    f"but buckets were stepped in the backward: set it before the forward, or use finality 'pipelined'"
                )


def _step_groups(inner: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    whole, inner.param_groups = inner.param_groups, groups
    try:
        inner.step()
    finally:
        inner.param_groups = whole
