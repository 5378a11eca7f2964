"""Which blocks a family's layers are made of, and what its config.json says; read from `transformers` and vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.reference_blocks import (
    Attention,
    Config,
    Experts,
    LatentAttention,
    Mlp,
    Norms,
    OutputBias,
    Renamed,
    Whole,
)
from tests.helpers.reference_delta import DeltaNet, GatedAttention
from tests.helpers.reference_stacked import StackedExperts


@dataclass(frozen=True)
class Reference:
    """`blocks(config, layer)`: what the layer consists of. `ends`: vLLM's embedding, norm and head; `spares`: those of
    them that it keeps on every pipeline stage."""

    base: dict[str, Any]
    blocks: Callable[[Config, int], list[Any]]
    ends: tuple[str, str, str] = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    spares: tuple[str, ...] = ()
    ties: bool = True
    """Whether there are models with one tensor for embedding and head."""
    small: dict[str, Any] = field(default_factory=dict)
    """What, beside TINY, makes the model so small that thousands of layouts can be tried."""

    def config(self, **changes: Any) -> dict[str, Any]:
        return self.base | changes


DENSE: dict[str, Any] = {
    "num_hidden_layers": 7,
    "hidden_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 40,
    "vocab_size": 101,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
"""All numbers distinct, head_dim not hidden / heads, layers prime."""

QWEN3_MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 12,  # 10 sorts before 2 as text
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
TINY = dict(num_hidden_layers=3, hidden_size=6, num_attention_heads=4, head_dim=2, vocab_size=11, intermediate_size=8)
"""3 layers, 4 query and 2 key/value heads."""


def config(**changes: Any) -> dict[str, Any]:
    """A Qwen3-MoE."""
    return QWEN3_MOE | changes


def _qwen3_moe(c: Config, layer: int) -> list[Any]:
    dense = layer in c.get("mlp_only_layers", ())
    mlp = Mlp(c["intermediate_size"]) if dense else Experts(c["moe_intermediate_size"])
    return [Norms((True, dense)), Attention(qk_norm=True), mlp]


def _qwen2_moe(c: Config, layer: int) -> list[Any]:
    if layer in c.get("mlp_only_layers", ()):
        return [Norms((True, True)), Attention(bias=True), Mlp(c["intermediate_size"])]
    shared = Mlp(c["shared_expert_intermediate_size"], "mlp.shared_expert.", "mlp.shared_experts.")
    gate = Whole("mlp.shared_expert_gate.weight", (1, c["hidden_size"]), "mlp.shared_experts.gate_weight")
    return [Norms(), Attention(bias=True), Experts(c["moe_intermediate_size"]), shared, gate]


def _qwen3_next(c: Config, layer: int) -> list[Any]:
    every = (layer + 1) % c["full_attention_interval"] == 0
    full = c["layer_types"][layer] == "full_attention" if "layer_types" in c else every
    dense = layer in c.get("mlp_only_layers", ())
    mlp = [Mlp(c["intermediate_size"])] if dense else _qwen2_moe(c, layer)[2:]
    if full:
        return [Norms((True, dense)), GatedAttention(), *mlp]
    return [Norms((True, dense), "in_proj"), DeltaNet(), *mlp]


def _qwen3(c: Config, layer: int) -> list[Any]:
    return [Norms((True, True)), Attention(qk_norm=True), Mlp(c["intermediate_size"])]


def _llama(c: Config, layer: int) -> list[Any]:
    return [Norms((True, True)), Attention(), Mlp(c["intermediate_size"])]


def _mixtral(c: Config, layer: int) -> list[Any]:
    experts = Experts(c["intermediate_size"], "block_sparse_moe.", ("w1", "w3", "w2"))
    return [Norms(), Attention(), experts]


def _behind_dense(c: Config, layer: int) -> tuple[list[Any], bool]:
    """The MLP of a layer whose model begins with dense ones, and whether this is one of those."""
    if layer < c["first_k_dense_replace"]:
        return [Mlp(c["intermediate_size"])], True
    width = c["moe_intermediate_size"]
    shared = Mlp(width * c["n_shared_experts"], "mlp.shared_experts.", "mlp.shared_experts.")
    bias = Whole("mlp.gate.e_score_correction_bias", (c["n_routed_experts"],), "mlp.router.expert_bias")
    return [Experts(width), bias, *([shared] if c["n_shared_experts"] else [])], False


def _glm4_moe(c: Config, layer: int) -> list[Any]:
    mlp, dense = _behind_dense(c, layer)
    return [Norms((True, dense)), Attention(bias=c["attention_bias"], qk_norm=c["use_qk_norm"]), *mlp]


def _deepseek_v3(c: Config, layer: int) -> list[Any]:
    mlp, dense = _behind_dense(c, layer)
    return [Norms((False, dense)), LatentAttention(), *mlp]


def _deepseek_v2(c: Config, layer: int) -> list[Any]:
    return [block for block in _deepseek_v3(c, layer) if not isinstance(block, Whole)]


def _gpt_oss(c: Config, layer: int) -> list[Any]:
    return [Norms(), Renamed(Attention(bias=True)), Renamed(OutputBias()), StackedExperts()]


DENSE_FIRST = {
    "first_k_dense_replace": 2,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
LATENT = {"q_lora_rank": 28, "kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6}
SMALL_FIRST = dict(first_k_dense_replace=1, n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=8)
SMALL_LATENT = dict(q_lora_rank=8, kv_lora_rank=6, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2)
DELTA = {
    "full_attention_interval": 3,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 24,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 4,
}
SMALL_DELTA = dict(full_attention_interval=2, linear_num_key_heads=4, linear_num_value_heads=8)
EVERYWHERE = ("embed", "norm", "head")
DEEPSEEK = {key: value for key, value in DENSE.items() if key != "head_dim"}
DEEPSEEK |= {**DENSE_FIRST, **LATENT, "num_key_value_heads": 8}

REFERENCES = {
    "qwen3_moe": Reference(
        QWEN3_MOE, _qwen3_moe, spares=EVERYWHERE, small=dict(num_experts=4, moe_intermediate_size=8)
    ),
    "qwen2_moe": Reference(
        QWEN3_MOE | {"model_type": "qwen2_moe", "head_dim": 6, "shared_expert_intermediate_size": 24},
        _qwen2_moe,
        spares=EVERYWHERE,
        small=dict(num_experts=4, moe_intermediate_size=8, hidden_size=8, shared_expert_intermediate_size=4),
    ),
    "qwen3_next": Reference(
        QWEN3_MOE | DELTA | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 24},
        _qwen3_next,
        spares=("embed", "head"),
        ties=False,
        small=dict(num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=4, **SMALL_DELTA),
    ),
    "qwen3": Reference(DENSE | {"model_type": "qwen3"}, _qwen3),
    "llama": Reference(DENSE | {"model_type": "llama"}, _llama),
    "mixtral": Reference(
        DENSE | {"model_type": "mixtral", "num_local_experts": 12, "num_experts_per_tok": 2},
        _mixtral,
        spares=EVERYWHERE,
        small=dict(num_local_experts=4),
    ),
    "glm4_moe": Reference(
        DENSE | DENSE_FIRST | {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True},
        _glm4_moe,
        small=SMALL_FIRST,
    ),
    "gpt_oss": Reference(
        DENSE | {"model_type": "gpt_oss", "num_local_experts": 12, "num_experts_per_tok": 2},
        _gpt_oss,
        ends=("model.embedding.weight", "model.norm.weight", "lm_head.weight"),
        spares=EVERYWHERE,
        small=dict(num_local_experts=4),
    ),
    "deepseek_v2": Reference(
        DEEPSEEK | {"model_type": "deepseek_v2"},
        _deepseek_v2,
        small={**SMALL_FIRST, **SMALL_LATENT, "num_key_value_heads": 4},
    ),
    "deepseek_v3": Reference(
        DEEPSEEK | {"model_type": "deepseek_v3"},
        _deepseek_v3,
        small={**SMALL_FIRST, **SMALL_LATENT, "num_key_value_heads": 4},
    ),
}
