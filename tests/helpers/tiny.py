"""The tiny Qwen3-MoE, Qwen2-MoE and GLM-4.5-MoE that trainer tests use, and their data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megastream.rl import oracle
from megastream.rl.config import ModelConfig
from megastream.trainer.config import TrainerConfig
from megastream.trainer.model import TokenBatch

SEQUENCE, BATCH, MICROBATCHES = 16, 2, 2


def tiny_config(**settings: Any) -> TrainerConfig:
    """4 layers, hidden 48, 8 heads of 8 in 4 groups, 8 experts top-2 of 20, vocabulary 102."""
    model = dict(layers=4, hidden=48, heads=8, kv_groups=4, head_dim=8, experts=8, top_k=2, expert_ffn=20, vocab=102)
    return TrainerConfig(**{**model, "max_sequence": SEQUENCE, "seed": 7, **settings})


def tiny_qwen2(**settings: Any) -> TrainerConfig:
    """The same in Qwen2's shape: head_dim hidden / heads, biases, no norms of heads, a gated shared expert of 28."""
    model = dict(head_dim=6, qk_norm=False, qkv_bias=True, norm_top_k=False, shared_ffn=28)
    return tiny_config(**{**model, **settings})


def tiny_glm4(**settings: Any) -> TrainerConfig:
    """The same in GLM-4.5's shape: a dense layer of 36 first, shared experts of 40, and routers with a bias.

    The bias moves by as much as scores differ, so that it changes which experts are chosen.
    """
    model = dict(qkv_bias=True, shared_ffn=40, shared_gate=False, dense_layers=1, dense_ffn=36)
    router = dict(router_expert_bias=True, router_bias_rate=0.05, router_scale=2.5, rope_part=0.5)
    return tiny_config(**{**model, **router, **settings})


def hf_config(config: TrainerConfig) -> dict[str, Any]:
    """The Hugging Face config.json of the same model."""
    name, own = _QWEN3
    if config.router_expert_bias:
        name, own = "Glm4MoeForCausalLM", _glm4_fields(config)
    elif config.shared_ffn:
        name, own = "Qwen2MoeForCausalLM", _qwen2_fields(config)
    return {
        "architectures": [name],
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.expert_ffn,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_groups,
        "head_dim": config.head_dim,
        "num_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_ffn,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "norm_topk_prob": config.norm_top_k,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": config.max_sequence,
        "torch_dtype": config.dtype,
        **own,
    }


_QWEN3: tuple[str, dict[str, Any]] = ("Qwen3MoeForCausalLM", {"model_type": "qwen3_moe"})


def _qwen2_fields(config: TrainerConfig) -> dict[str, Any]:
    return {"model_type": "qwen2_moe", "shared_expert_intermediate_size": config.shared_ffn, "qkv_bias": True}


def _glm4_fields(config: TrainerConfig) -> dict[str, Any]:
    return {
        "model_type": "glm4_moe",
        "n_routed_experts": config.experts,
        "n_shared_experts": config.shared_ffn // config.expert_ffn,
        "first_k_dense_replace": config.dense_layers,
        "intermediate_size": config.dense_ffn,
        "routed_scaling_factor": config.router_scale,
        "partial_rotary_factor": config.rope_part,
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm,
        "num_nextn_predict_layers": config.mtp_layers,
        "n_group": 1,
        "topk_group": 1,
    }


def batches(config: TrainerConfig, step: int, replica: int) -> Iterator[TokenBatch]:
    """The microbatches of one step on one data-parallel replica."""
    generator = torch.Generator().manual_seed(step * 1000 + replica)
    for _ in range(MICROBATCHES):
        yield TokenBatch(torch.randint(0, config.vocab, (BATCH, SEQUENCE + 1), generator=generator))


def hf_shapes(config: TrainerConfig) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model with its shape."""
    hidden, head = config.hidden, config.head_dim
    q, kv = config.heads * head, config.kv_groups * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, hidden)}
    for layer in range(config.layers + config.mtp_layers):
        prefix = f"model.layers.{layer}."
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        norms = {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)} if config.qk_norm else {}
        norms |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
        if config.qkv_bias:
            shapes |= {f"{prefix}self_attn.{name}.bias": attention[name][:1] for name in ("q_proj", "k_proj", "v_proj")}
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in norms.items()}
        shapes |= _mlp_shapes(config, f"{prefix}mlp.", dense=layer < config.dense_layers)
        if layer >= config.layers:
            shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
            shapes[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    return shapes


def _mlp_shapes(config: TrainerConfig, prefix: str, dense: bool) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden
    shapes: dict[str, tuple[int, ...]] = {}
    widths = {"": config.dense_ffn}
    if not dense:
        widths = {f"experts.{expert}.": config.expert_ffn for expert in range(config.experts)}
        shapes["gate.weight"] = (config.experts, hidden)
    if not dense and config.shared_ffn:
        widths[f"{SHARED_EXPERT[config.shared_gate]}."] = config.shared_ffn
        shapes |= {"shared_expert_gate.weight": (1, hidden)} if config.shared_gate else {}
    if not dense and config.router_expert_bias:
        shapes[BIAS] = (config.experts,)
    for name, width in widths.items():
        linears = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        shapes |= {f"{name}{linear}.weight": shape for linear, shape in linears.items()}
    return {prefix + name: shape for name, shape in shapes.items()}


BIAS = "gate.e_score_correction_bias"
SHARED_EXPERT = {True: "shared_expert", False: "shared_experts"}
"""Hugging Face's name, with a gate of its own (Qwen2) and without (GLM)."""


def hf_dtype(config: TrainerConfig, name: str) -> torch.dtype:
    """Routers' biases are fp32, whatever the rest is."""
    return torch.float32 if name.endswith(BIAS) else getattr(torch, config.dtype)


def gathered(dumps: Sequence[oracle.Dump], config: TrainerConfig) -> dict[str, torch.Tensor]:
    """Hugging Face tensors from what `save_raw` wrote on every rank, by the slow gather that knows no layout."""
    full = oracle.to_hf(oracle.gather(dumps), oracle_model(config))
    name = SHARED_EXPERT[config.shared_gate]
    return {key.replace("mlp.shared_expert.", f"mlp.{name}."): value for key, value in full.items()}


def oracle_model(config: TrainerConfig) -> ModelConfig:
    """The same model, as the oracle of `rl/` wants it."""
    return ModelConfig(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_groups,
        head_dim=config.head_dim,
        experts=config.experts,
        top_k=config.top_k,
        expert_ffn=config.expert_ffn,
    )
