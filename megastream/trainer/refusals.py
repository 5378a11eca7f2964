"""Megatron settings under which it is not known when a weight is final, or what it is called: refused by name.

Every refusal is one line: the setting, its value, the reason, the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megastream.families.family import Family
from megastream.families.types import ModelShape
from megastream.trainer.compat import UnsupportedTrainer

Refusals = tuple[tuple[str, str, str], ...]
"""(setting, why, remedy); a setting that is None, False, 0 or missing is fine."""
Onlys = tuple[tuple[str, Any, str, str], ...]
"""(setting, the one value that is fine, why, remedy); a setting that is missing is fine, too."""

_OPTIMIZER: Refusals = (
    ("fp16", "whether a step counts is known only after all gradients were unscaled", "use bf16"),
    ("loss_scale", "whether a step counts is known only after all gradients were unscaled", "leave it out"),
    ("use_precision_aware_optimizer", "its fp32 masters live inside the fused optimizer", "switch it off"),
    ("optimizer_cpu_offload", "its masters move between devices inside the step", "switch it off"),
    ("overlap_param_gather_with_optimizer_step", "weights would still arrive after the step", "switch it off"),
    ("reuse_grad_buf_for_mxfp8_param_ag", "a bucket's bytes would not be the weights", "switch it off"),
    ("optimizer_cuda_graph", "its step count is on the GPU, and each bucket would advance it", "switch it off"),
)
_DDP: Refusals = (
    ("overlap_param_gather", "weights would still arrive during the next forward", "switch it off"),
    ("use_megatron_fsdp", "its parameters are sharded in another way", "switch it off"),
    ("fp8_param_gather", "a bucket's bytes would not be the weights", "switch it off"),
    ("fp4_param_gather", "a bucket's bytes would not be the weights", "switch it off"),
)
_MODEL: Refusals = (
    ("mtp_use_repeated_layer", "one layer would be several of a checkpoint's", "switch it off"),
    (
        "multi_latent_attention",
        "steps of its projections to latents were not compared with stock",
        "use grouped query attention",
    ),
    ("add_bias_linear", "no family table has the biases of all linears", "switch it off"),
    ("moe_use_legacy_grouped_gemm", "one parameter would hold all experts of a rank", "switch it off"),
    ("fp8", "a bucket's bytes would not be the weights", "train in bf16"),
    ("fp4", "a bucket's bytes would not be the weights", "train in bf16"),
    ("mtp_detach_heads", "the gradients of these heads are clipped by a norm of their own", "switch it off"),
    ("moe_single_grouped_weight", "one parameter would hold all experts of a rank", "switch it off"),
    ("moe_mlp_glu_interleave_size", "gate and up would lie in turns in one weight", "leave it out"),
    ("moe_shared_expert_glu_interleave_size", "gate and up would lie in turns in one weight", "leave it out"),
    ("use_mup", "activations and logits are scaled by factors that no engine has", "switch it off"),
)
_OPTIMIZER_ONLY: Onlys = (
    ("optimizer", "adam", "only adam steps elementwise", "use adam"),
    ("grad_norm_skip_threshold", math.inf, "steps above it are skipped by stock alone", "leave it out"),
)
_DDP_ONLY: Onlys = (
    ("num_distributed_optimizer_instances", 1, "a bucket would have owners in several groups", "set it to 1"),
    ("use_distributed_optimizer", True, "the steppers step the owners' slices", "set it to True"),
)
_MODEL_ONLY: Onlys = (
    ("gtp_weight_remat_size", 1, "gradients change after their reduction", "shard weights by TP alone"),
    ("expert_gtp_weight_remat_size", 1, "gradients change after their reduction", "shard experts by ETP alone"),
)
_BALANCING = "moe_router_load_balancing_type"


def refuse_unsupported(chunks: Sequence[Any], optimizer: Any) -> None:
    """UnsupportedTrainer names the first setting of the model, of DDP or of the optimizer that is not supported."""
    for chunk in chunks:
        if getattr(chunk, "ddp_config", None) is None:
            raise UnsupportedTrainer(
                f"model chunk {type(chunk).__name__} is not supported: its gradients are not in Megatron's buckets; "
                "wrap it in megatron.core.distributed.DistributedDataParallel"
            )
    for owner, config, off, only in (
        ("TransformerConfig", chunks[0].config, _MODEL, _MODEL_ONLY),
        ("DistributedDataParallelConfig", chunks[0].ddp_config, _DDP, _DDP_ONLY),
        ("OptimizerConfig", optimizer.config, _OPTIMIZER, _OPTIMIZER_ONLY),
    ):
        _refuse_on(owner, config, off)
        _refuse_other(owner, config, only)
    if (balancing := getattr(chunks[0].config, _BALANCING, "none")) == "quantile_balancing":
        raise UnsupportedTrainer(
            f"TransformerConfig.{_BALANCING}={balancing} is not supported: it routes by a bias that is no parameter, "
            f"and no family table has it; choose another one"
        )


def refuse_family(family: Family) -> None:
    """UnsupportedTrainer when Megatron computes with other values than the family's files and engines."""
    if family.trainer_differs:
        raise UnsupportedTrainer(
            f"model family {family.name} is not supported: {family.trainer_differs}; it can be planned, and converted "
            "between Hugging Face's form and vLLM's"
        )


def refuse_mtp(chunks: Sequence[Any], family: Family, shape: ModelShape) -> None:
    """UnsupportedTrainer when the model has layers of multi-token prediction that cannot be named or stepped."""
    if not (layers := chunks[0].config.mtp_num_layers):
        return
    reason = ""
    if not family.has_mtp:
        reason = f"the table of family {family.name} has no rows for multi-token prediction"
    elif shape.tied:
        reason = "with a tied head Megatron leaves a second one on the last stage, which is never trained"
    elif any(getattr(param, "grad_norm_group", None) for chunk in chunks for param in chunk.parameters()):
        reason = "its gradients are clipped by a norm of their own (grad_norm_group)"
    if reason:
        raise UnsupportedTrainer(
            f"TransformerConfig.mtp_num_layers={layers} is not supported: {reason}; leave these layers out"
        )


def _refuse_on(owner: str, config: Any, table: Refusals) -> None:
    for name, reason, remedy in table:
        if value := getattr(config, name, None):
            raise UnsupportedTrainer(f"{owner}.{name}={value} is not supported: {reason}; {remedy}")


def _refuse_other(owner: str, config: Any, table: Onlys) -> None:
    for name, only, reason, remedy in table:
        if (value := getattr(config, name, only)) != only:
            raise UnsupportedTrainer(f"{owner}.{name}={value!r} is not supported: {reason}; {remedy}")
