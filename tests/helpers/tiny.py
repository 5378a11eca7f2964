"""The tiny Qwen3-MoE that trainer tests use, and its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megastream.trainer.config import TrainerConfig
from megastream.trainer.model import TokenBatch

SEQUENCE, BATCH, MICROBATCHES = 16, 2, 2


def tiny_config(**settings: Any) -> TrainerConfig:
    """4 layers, hidden 48, 8 heads of 8 in 4 groups, 8 experts top-2 of 20, vocabulary 102."""
    model = dict(layers=4, hidden=48, heads=8, kv_groups=4, head_dim=8, experts=8, top_k=2, expert_ffn=20, vocab=102)
    return TrainerConfig(**{**model, "max_sequence": SEQUENCE, "seed": 7, **settings})


def hf_config(config: TrainerConfig) -> dict[str, Any]:
    """The Hugging Face config.json of the same model."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
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
        "norm_topk_prob": True,
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
