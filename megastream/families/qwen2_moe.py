"""Qwen2-MoE: biases of queries, keys and values, no norms of heads, and a gated shared expert."""

from __future__ import annotations

from megastream.families.config import number
from megastream.families.decoder import decoder_sizes
from megastream.families.family import Family
from megastream.families.qwen3_moe import is_moe, read_moe
from megastream.families.rows import (
    ATTENTION,
    DENSE_MLP,
    QKV_BIAS,
    SHARED_IN_EXPERTS,
    ends,
    experts,
    hf,
    layer_row,
    mlp,
    router,
)
from megastream.families.types import ModelShape

SHARED_EXPERT = (
    *mlp("moe", "mlp.shared_expert.", "shared_ffn", "mlp.shared_experts."),
    layer_row("moe", hf("mlp.shared_expert_gate.weight", "one", "hidden"), "mlp.shared_experts.gate_weight"),
)
"""An expert that every token passes, and its sigmoid gate."""
SHARED_ALIASES = (
    ("mlp.shared_expert.", SHARED_IN_EXPERTS),
    ("mlp.shared_expert_gate.", f"{SHARED_IN_EXPERTS}expert_gate."),
)
ROWS = (
    *ends(spares=True),
    *ATTENTION,
    QKV_BIAS,
    router(),
    *experts(),
    *SHARED_EXPERT,
    *DENSE_MLP,
)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `Qwen2MoeConfig`. ValueError names a field that is missing or that vLLM ignores."""
    shape = read_moe("qwen2_moe", config)
    if shape.head_dim != shape.hidden // shape.num_heads:
        raise ValueError(
            f"config.json field head_dim is {shape.head_dim}; a Qwen2-MoE has hidden_size / num_attention_heads = "
            f"{shape.hidden // shape.num_heads}"
        )
    if config.get("qkv_bias", True) is not True:
        raise ValueError(f"config.json field qkv_bias is {config['qkv_bias']!r}; a Qwen2-MoE always has these biases")
    if number(config, "shared_expert_intermediate_size") == 0:
        raise ValueError("config.json field shared_expert_intermediate_size is 0; a Qwen2-MoE has a shared expert")
    return shape


def sizes(shape: ModelShape) -> dict[str, int]:
    """The numbers that the table's dims are written in."""
    shared = number(shape.raw, "shared_expert_intermediate_size")
    return {**decoder_sizes(shape), "shared_ffn": shared, "one": 1}


FAMILY = Family(
    name="qwen2_moe",
    rows=ROWS,
    read=read,
    sizes=sizes,
    is_moe=is_moe,
    aliases=SHARED_ALIASES,
)
