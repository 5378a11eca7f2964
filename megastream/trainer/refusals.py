"""Megatron settings under which it is not known when a weight is final, or what it is called: refused by name.

Every refusal is one line: the setting, its value, the reason, the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megastream.trainer.compat import UnsupportedTrainer

Refusals = tuple[tuple[str, str, str], ...]
"""(setting, why, remedy); a setting that is None, False, 0 or missing is fine."""

_OPTIMIZER: Refusals = (
    ("fp16", "whether a step counts is known only after all gradients were unscaled", "use bf16"),
    ("loss_scale", "whether a step counts is known only after all gradients were unscaled", "leave it out"),
    ("use_precision_aware_optimizer", "its fp32 masters live inside the fused optimizer", "switch it off"),
    ("optimizer_cpu_offload", "its masters move between devices inside the step", "switch it off"),
    ("overlap_param_gather_with_optimizer_step", "weights would still arrive after the step", "switch it off"),
    ("reuse_grad_buf_for_mxfp8_param_ag", "a bucket's bytes would not be the weights", "switch it off"),
)
_DDP: Refusals = (
    ("overlap_param_gather", "weights would still arrive during the next forward", "switch it off"),
    ("use_megatron_fsdp", "its parameters are sharded in another way", "switch it off"),
    ("fp8_param_gather", "a bucket's bytes would not be the weights", "switch it off"),
)
_MODEL: Refusals = (
    ("mtp_num_layers", "no family table has the weights of multi-token prediction layers", "leave them out"),
    ("multi_latent_attention", "no family table has its projections", "use grouped query attention"),
    ("add_bias_linear", "no family table has the biases of all linears", "switch it off"),
    ("moe_use_legacy_grouped_gemm", "one parameter would hold all experts of a rank", "switch it off"),
    ("fp8", "a bucket's bytes would not be the weights", "train in bf16"),
    ("fp4", "a bucket's bytes would not be the weights", "train in bf16"),
)


def refuse_unsupported(chunks: Sequence[Any], optimizer: Any) -> None:
    """UnsupportedTrainer names the first setting of the model, of DDP or of the optimizer that is not supported."""
    for chunk in chunks:
        if getattr(chunk, "ddp_config", None) is None:
            raise UnsupportedTrainer(
                f"model chunk {type(chunk).__name__} is not supported: its gradients are not in Megatron's buckets; "
                "wrap it in megatron.core.distributed.DistributedDataParallel"
            )
    ddp = chunks[0].ddp_config
    _refuse("TransformerConfig", chunks[0].config, _MODEL)
    _refuse("DistributedDataParallelConfig", ddp, _DDP)
    _refuse("OptimizerConfig", optimizer.config, _OPTIMIZER)
    if (name := optimizer.config.optimizer) != "adam":
        raise UnsupportedTrainer(
            f"OptimizerConfig.optimizer={name!r} is not supported: only adam steps elementwise; use adam"
        )
    if (instances := ddp.num_distributed_optimizer_instances) != 1:
        raise UnsupportedTrainer(
            f"num_distributed_optimizer_instances={instances} is not supported: "
            "a bucket would have owners in several groups; set it to 1"
        )
    if not ddp.use_distributed_optimizer:
        raise UnsupportedTrainer(
            "use_distributed_optimizer=False is not supported: the steppers step the owners' slices; set it to True"
        )


def _refuse(owner: str, config: Any, table: Refusals) -> None:
    for name, reason, remedy in table:
        if value := getattr(config, name, None):
            raise UnsupportedTrainer(f"{owner}.{name}={value} is not supported: {reason}; {remedy}")
