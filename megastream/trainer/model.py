"""A Qwen3-MoE-shaped model on megatron-core, for people without a training script of their own.

`build` makes model chunks and optimizer from one typed config, `train_step` runs forward and backward of one step.
Both are called on every trainer rank, with the same config.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megastream.trainer import compat
from megastream.trainer.config import TrainerConfig, check_layout


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One microbatch: `tokens` int64 [batch, sequence + 1]; `mask` [batch, sequence], 1 where a target counts."""

    tokens: torch.Tensor
    mask: torch.Tensor | None = None


def start_process_group(
    config: TrainerConfig, *, rank: int, world_size: int, init_method: str, deadline_s: float
) -> str:
    """Joins the trainer's own process group and megatron's mesh; returns the device type. Collective, blocking."""
    from megatron.core import parallel_state

    check_layout(config, world_size)
    device = compat.install()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=deadline_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
        # A second gloo group per mesh axis would serve megatron's own checkpoints only.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(deadline_s / 60)),
    )
    return device


def build(config: TrainerConfig) -> tuple[list[Any], Any]:
    """Model chunks (one per virtual stage, in DDP) and the chained distributed optimizer of this rank.

    Needs `start_process_group` or megatron's own initialisation. Initial weights follow `seed`; experts of different
    EP ranks start equal, so real runs load a checkpoint (`MegatronAdapter.load_hf`).
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    check_layout(config, dist.get_world_size())
    device = compat.install()
    if device == "cuda":
        # Weights are drawn from megatron's own generators there; a second model starts where the first one did.
        model_parallel_cuda_manual_seed(config.seed)
    transformer = _transformer_config(config, device)
    stages: Sequence[int | None] = range(config.vpp) if config.vpp else (None,)
    chunks = [_chunk(config, transformer, stage, device) for stage in stages]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr,
            weight_decay=config.weight_decay,
            bf16=config.dtype == "bfloat16",
            params_dtype=getattr(torch, config.dtype),
            clip_grad=config.clip,
            use_distributed_optimizer=True,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    transformer.finalize_model_grads_func = finalize_model_grads
    transformer.grad_scale_func = optimizer.scale_loss
    if config.overlap_grad_reduce:
        transformer.no_sync_func = [chunk.no_sync for chunk in chunks] if config.vpp else chunks[0].no_sync
    return chunks, optimizer


def _transformer_config(config: TrainerConfig, device: str) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = getattr(torch, config.dtype)
    # Each of these would call an apex or CUDA kernel.
    only_cpu = dict(use_cpu_initialization=True, persist_layer_norm=False, batch_p2p_comm=False, batch_p2p_sync=False)
    return TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_query_groups=config.kv_groups,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.expert_ffn,
        moe_ffn_hidden_size=config.expert_ffn,
        num_moe_experts=config.experts,
        moe_router_topk=config.top_k,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=config.dispatcher,
        moe_grouped_gemm=compat.has_transformer_engine(),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
        sequence_parallel=config.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **(only_cpu if device == "cpu" else {}),
    )


def _chunk(config: TrainerConfig, transformer: Any, stage: int | None, device: str) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(config.seed)
    virtual = {} if stage is None else {"vp_stage": stage}
    ends = {"ignore_virtual": stage is None, **virtual}
    model = GPTModel(
        transformer,
        _layer_spec(transformer, stage),
        vocab_size=config.vocab,
        max_sequence_length=config.max_sequence,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type="rope",
        rotary_base=int(config.rope_theta),
        **virtual,
    )
    model = model.cuda() if device == "cuda" else model
    model = Float16Module(transformer, model) if config.dtype == "bfloat16" else model
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        bucket_size=config.ddp_bucket_elements,
    )
    chunk = DistributedDataParallel(transformer, ddp_config, model)
    chunk.broadcast_params()
    return chunk


class _MarkedRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the mark that makes megatron sum its gradient over TP; its own wrapper refuses SP."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def _layer_spec(transformer: Any, stage: int | None) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    if compat.has_transformer_engine():
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=transformer.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=True
        )
    layer = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=transformer.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    if not transformer.sequence_parallel:
        return layer
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = _MarkedRMSNorm
    attention.q_layernorm = attention.k_layernorm = _MarkedRMSNorm
    num_layers = get_num_layers_to_build(transformer, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=_MarkedRMSNorm)


def train_step(
    chunks: Sequence[Any],
    batches: Iterator[TokenBatch],
    *,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
) -> float | None:
    """Forward and backward of one step; gradients lie reduced in the DDP buffers afterwards.

    Returns this data-parallel replica's mean next-token loss on ranks of the last stage, None elsewhere. Every rank
    calls it; ranks of one replica pass equal batches, `num_microbatches` of them. Blocks until the gradients are in.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    compat.install()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    several = len(chunks) > 1
    iterators = list(itertools.tee(batches, len(chunks)))
    losses = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iterators if several else iterators[0],
        model=list(chunks) if several else chunks[0],
        num_microbatches=num_microbatches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=False,
    )
    return sum(float(entry["loss"]) for entry in losses) / num_microbatches if losses else None


def _forward(batches: Iterator[TokenBatch], model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    size, length = batch.tokens.shape[0], batch.tokens.shape[1] - 1
    device = next(model.parameters()).device
    tokens = batch.tokens.to(device)
    positions, causal = _positions_and_mask(length, device)
    losses = model(tokens[:, :-1], positions.expand(size, -1), causal, labels=tokens[:, 1:])
    mask = None if batch.mask is None else batch.mask.to(device)

    def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        output = output.float()
        loss = output.mean() if mask is None else (output * mask).sum() / mask.sum()
        return loss, {"loss": loss.detach().clone()}

    return losses, mean_loss


def _positions_and_mask(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [1, length], and the mask [1, 1, length, length] that is true where attention may not look."""
    ahead = torch.ones(length, length, dtype=torch.bool, device=device).triu(diagonal=1)
    return torch.arange(length, device=device)[None], ahead[None, None]
