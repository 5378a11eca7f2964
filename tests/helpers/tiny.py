"""The tiny Qwen3-MoE and Qwen2-MoE that trainer tests use, and their data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

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


def hf_config(config: TrainerConfig) -> dict[str, Any]:
    """The Hugging Face config.json of the same model."""
    qwen2 = config.shared_ffn > 0
    own = {"shared_expert_intermediate_size": config.shared_ffn, "qkv_bias": True} if qwen2 else {}
    return {
        "architectures": ["Qwen2MoeForCausalLM" if qwen2 else "Qwen3MoeForCausalLM"],
        "model_type": "qwen2_moe" if qwen2 else "qwen3_moe",
        **own,
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
    }


def batches(config: TrainerConfig, step: int, replica: int) -> Iterator[TokenBatch]:
    """The microbatches of one step on one data-parallel replica."""
    generator = torch.Generator().manual_seed(step * 1000 + replica)
    for _ in range(MICROBATCHES):
        yield TokenBatch(torch.randint(0, config.vocab, (BATCH, SEQUENCE + 1), generator=generator))


def hf_shapes(config: TrainerConfig) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model with its shape."""
    hidden, head, ffn = config.hidden, config.head_dim, config.expert_ffn
    q, kv = config.heads * head, config.kv_groups * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        attention = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        norms = {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)} if config.qk_norm else {}
        norms |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
        if config.qkv_bias:
            shapes |= {f"{prefix}self_attn.{name}.bias": attention[name][:1] for name in ("q_proj", "k_proj", "v_proj")}
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in norms.items()}
        shapes[f"{prefix}mlp.gate.weight"] = (config.experts, hidden)
        experts = {f"experts.{expert}": ffn for expert in range(config.experts)}
        if config.shared_ffn:
            experts["shared_expert"] = config.shared_ffn
            shapes[f"{prefix}mlp.shared_expert_gate.weight"] = (1, hidden)
        for expert, width in experts.items():
            linears = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
            shapes |= {f"{prefix}mlp.{expert}.{name}.weight": shape for name, shape in linears.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    return shapes


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
