"""What every comparison with stock needs: a model with its adapter, one step of either kind, and what came out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from megastream.families import family_of, load_shape
from megastream.trainer import compat, model
from megastream.trainer.adapter import MegatronAdapter
from megastream.trainer.config import TrainerConfig
from tests.helpers.tiny import hf_config

BUCKET_ELEMENTS = 6000


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """One number for all bytes of the tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def adapter_of(
    config: TrainerConfig, finality: str, ownership: str = "replica", bucket_elements: int = BUCKET_ELEMENTS
) -> tuple[list[Any], Any, MegatronAdapter]:
    """A new model: its chunks, its optimizer, and an adapter for a policy; that of "stock" is for loading only."""
    chunks, optimizer = model.build(config)
    shape = load_shape(hf_config(config))
    adapter = MegatronAdapter(
        chunks,
        optimizer,
        family_of(shape),
        shape,
        bucket_elements=bucket_elements,
        finality="pipelined" if finality == "stock" else finality,  # type: ignore[arg-type]
        experts_per_unit=2,
        ownership=ownership,  # type: ignore[arg-type]
    )
    return chunks, optimizer, adapter


def parameters(chunks: list[Any]) -> list[torch.nn.Parameter]:
    return [parameter for chunk in chunks for parameter in chunk.parameters()]


def router_biases(chunks: list[Any]) -> list[torch.Tensor]:
    """What routers add to scores for the choice of experts; megatron's buffers, none in most models."""
    return [t for chunk in chunks for name, t in chunk.named_buffers() if name.endswith("router.expert_bias")]


def set_rate(config: TrainerConfig, optimizer: Any, step: int) -> None:
    """Another learning rate in every step."""
    for group in optimizer.param_groups:
        group["lr"] = config.lr * (1 + 0.1 * step)


def update(optimizer: Any, stepper: Any) -> float:
    """The optimizer's step, stock without a stepper; returns the gradient norm."""
    if stepper is None:
        ok, norm, _ = optimizer.step()
    else:
        result = stepper.step()
        ok, norm = result.ok, result.grad_norm
    assert ok
    return float(norm)


def outcome(params: list[torch.nn.Parameter], before: list[torch.Tensor], optimizer: Any) -> dict[str, Any]:
    """Digests of this rank's parameters, moments and masters, and the steps that its optimizers count.

    `unmoved` is the number of parameters that are as they were `before`.
    """
    shards = list(compat.main_shards(optimizer))
    states = [shard.member.optimizer.state[shard.main] for shard in shards]
    return {
        "params": digest(params),
        "moments": digest(s[k] for s in states for k in ("exp_avg", "exp_avg_sq", "step") if k in s),
        "masters": digest(shard.main for shard in shards),
        "group steps": [group.get("step") for part in compat.members(optimizer) for group in part.param_groups],
        "unmoved": sum(torch.equal(a, b) for a, b in zip(before, params, strict=True)),
    }
