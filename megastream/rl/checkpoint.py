"""The checkpoint that both halves start from: a seeded random Qwen3-MoE under Hugging Face names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from megastream.rl.config import ModelConfig
from megastream.rl.data import BOS, EOS, PAD, VOCAB, write_tokenizer


def hf_config(model: ModelConfig, max_positions: int = 4096) -> dict[str, object]:
    """config.json of the shape, as transformers and vLLM read it."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "num_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "moe_intermediate_size": model.expert_ffn,
        "intermediate_size": 2 * model.hidden,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
        "max_position_embeddings": max_positions,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }


def tensor_shapes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint with its shape, in the order in which the random numbers are drawn."""
    hidden, ffn, q, kv = model.hidden, model.expert_ffn, model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield "model.embed_tokens.weight", (VOCAB, hidden)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (q, hidden)
        yield prefix + "self_attn.k_proj.weight", (kv, hidden)
        yield prefix + "self_attn.v_proj.weight", (kv, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, q)
        yield prefix + "self_attn.q_norm.weight", (model.head_dim,)
        yield prefix + "self_attn.k_norm.weight", (model.head_dim,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate.weight", (model.experts, hidden)
        for expert in range(model.experts):
            yield prefix + f"mlp.experts.{expert}.gate_proj.weight", (ffn, hidden)
            yield prefix + f"mlp.experts.{expert}.up_proj.weight", (ffn, hidden)
            yield prefix + f"mlp.experts.{expert}.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCAB, hidden)


def random_tensors(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """bf16 tensors. Norms are near 1, not 1, so that two of them cannot be taken for one another."""
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * model.layers) ** -0.5
    tensors = {}
    for name, shape in tensor_shapes(model):
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.05 * noise
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            value = noise * shape[-1] ** -0.5 * depth
        elif name.endswith("embed_tokens.weight"):
            value = noise
        else:
            value = noise * shape[-1] ** -0.5
        tensors[name] = value.to(torch.bfloat16)
    return tensors


def write_checkpoint(folder: Path, model: ModelConfig, tensors: dict[str, torch.Tensor]) -> None:
    """config.json, model.safetensors and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(model), indent=1))
    write_tokenizer(folder)
