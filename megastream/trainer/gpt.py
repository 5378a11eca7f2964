"""One pipeline stage of a Qwen-MoE- or GLM-4.5-shaped GPT on megatron-core, from the typed config. Called on every
trainer rank."""

from __future__ import annotations

import copy
from typing import Any

import torch

from megastream.trainer import compat
from megastream.trainer.config import TrainerConfig

_FUSIONS = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
)
"""Kernels of apex or TransformerEngine, or compiled ones; the model computes the same without them."""


def transformer_config(config: TrainerConfig, device: str) -> Any:
    """Megatron's own config of the model and its layout, for `device` "cpu" or "cuda".

    UnsupportedTrainer for context parallelism and for multi-token prediction with TransformerEngine.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    if compat.has_transformer_engine():
        _refuse_on_transformer_engine(config)
    dtype = getattr(torch, config.dtype)
    # Each of these would call an apex or CUDA kernel.
    only_cpu = dict(use_cpu_initialization=True, persist_layer_norm=False, batch_p2p_comm=False, batch_p2p_sync=False)
    return TransformerConfig(
        num_layers=config.layers,
        mtp_num_layers=config.mtp_layers or None,
        hidden_size=config.hidden,
        num_attention_heads=config.heads,
        num_query_groups=config.kv_groups,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.dense_ffn or config.expert_ffn,
        **_experts(config),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_eps,
        qk_layernorm=config.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.virtual_stages,
        pipeline_model_parallel_layout=_stages(config),
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
        sequence_parallel=config.tp > 1,
        calculate_per_token_loss=config.per_token_loss,
        **_recompute(config),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **dict.fromkeys(_FUSIONS, False),
        **(only_cpu if device == "cpu" else {}),
    )


def _refuse_on_transformer_engine(config: TrainerConfig) -> None:
    refusals = (
        (config.cp > 1, f"cp={config.cp}", "its attention over several ranks was never run here", "cp to 1"),
        (config.mtp_layers, f"mtp_layers={config.mtp_layers}", "its layers were never run here", "mtp_layers to 0"),
    )
    for refused, setting, reason, remedy in refusals:
        if refused:
            raise compat.UnsupportedTrainer(
                f"trainer setting {setting} is not supported with TransformerEngine: {reason}; set {remedy}"
            )


def _experts(config: TrainerConfig) -> dict[str, Any]:
    shared = dict(moe_shared_expert_intermediate_size=config.shared_ffn, moe_shared_expert_gate=config.shared_gate)
    with_bias = dict(
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=config.router_bias_rate,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=config.router_scale,
        moe_router_dtype="fp32",
    )
    dense, others = config.dense_layers, config.layers - config.dense_layers
    return dict(
        moe_ffn_hidden_size=config.expert_ffn,
        num_moe_experts=config.experts,
        moe_router_topk=config.top_k,
        # Softmax behind the choice makes a sum of 1 over the chosen experts, before it over all.
        moe_router_pre_softmax=not config.norm_top_k,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=config.dispatcher,
        moe_grouped_gemm=compat.has_transformer_engine(),
        **(shared if config.shared_ffn else {}),
        **(with_bias if config.router_expert_bias else {}),
        **({"moe_layer_freq": [0] * dense + [1] * others} if dense else {}),
    )


def _stages(config: TrainerConfig) -> list[list[str]] | None:
    """Megatron's custom layout: what stands on every (virtual) stage, in the order of the layers."""
    if config.stage_layers is None:
        return None
    stages = [["decoder"] * layers for layers in config.stage_layers]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * config.mtp_layers + ["loss"]
    return stages


def _recompute(config: TrainerConfig) -> dict[str, Any]:
    if config.recompute == "none":
        return {}
    if config.recompute == "selective":
        return dict(recompute_granularity="selective")
    return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def gpt_stage(config: TrainerConfig, transformer: Any, stage: int | None, device: str) -> Any:
    """The (virtual) stage of this rank, on its device, without DDP. Initial weights follow `config.seed`."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(config.seed)
    virtual = {} if stage is None else {"vp_stage": stage}
    ends = {"ignore_virtual": stage is None, **virtual}
    block = _block_spec(transformer, stage)
    model = GPTModel(
        transformer,
        block,
        vocab_size=config.vocab,
        max_sequence_length=config.max_sequence,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type="rope",
        rotary_base=int(config.rope_theta),
        rotary_percent=config.rope_part,
        mtp_block_spec=_mtp_spec(transformer, block, stage) if config.mtp_layers else None,
        **virtual,
    )
    model = model.cuda() if device == "cuda" else model
    return Float16Module(transformer, model) if config.dtype == "bfloat16" else model


class _MarkedRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the mark that makes megatron sum its gradient over TP; its own wrapper refuses SP."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class _GatheredAttention(torch.nn.Module):
    """Megatron's plain attention, which knows one rank only, over the keys and values of all ranks of a sequence.

    The mask [1, 1, queries of this rank, keys of all ranks] says which key lies where; see `model.sequence_parts`.
    """

    def __init__(self, config: Any, *args: Any, **named: Any) -> None:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        super().__init__()
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        self.core = DotProductAttention(alone, *args, **named)

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **named: Any) -> Any:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        group = parallel_state.get_context_parallel_group()
        keys, values = (gather_from_sequence_parallel_region(part, group=group) for part in (key, value))
        return self.core(query, keys, values, attention_mask, **named)


def _block_spec(transformer: Any, stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    on_te = compat.has_transformer_engine()
    block = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=on_te, normalization="RMSNorm", vp_stage=stage
    )
    if on_te:
        return block
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        if transformer.context_parallel_size > 1:
            attention.core_attention = _GatheredAttention
        if transformer.sequence_parallel:
            parts.input_layernorm = parts.pre_mlp_layernorm = _MarkedRMSNorm
        if transformer.sequence_parallel and transformer.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = _MarkedRMSNorm
    if transformer.sequence_parallel:
        block.layer_norm = _MarkedRMSNorm
    return block


def _mtp_spec(transformer: Any, block: Any, stage: int | None) -> Any:
    """Layers of multi-token prediction, made like the last layer of `block`; None on stages that have none."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    mtp = get_gpt_mtp_block_spec(transformer, block, use_transformer_engine=False, vp_stage=stage)
    if mtp is not None and transformer.sequence_parallel:
        for layer in mtp.layer_specs:
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = _MarkedRMSNorm
    return mtp
