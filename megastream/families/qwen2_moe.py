"""Qwen2-MoE: Qwen3-MoE's table without the norms of queries and keys, with biases and with a gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from megastream.families import qwen3_moe
from megastream.families.config import number
from megastream.families.family import Family
from megastream.families.types import ModelShape, Row, Source

_HF = "model.layers.{layer}."
_TRAINER = "decoder.layers.{layer}."
_SHARED = f"{_HF}mlp.shared_expert."
_ONLY_QWEN3 = (f"{_TRAINER}self_attention.q_layernorm.weight", f"{_TRAINER}self_attention.k_layernorm.weight")

ROWS = (
    *(row for row in qwen3_moe.ROWS if row.trainer[0] not in _ONLY_QWEN3),
    Row(
        kind="dense",
        layers="every",
        sources=(
            Source(f"{_HF}self_attn.q_proj.bias", ("q",)),
            Source(f"{_HF}self_attn.k_proj.bias", ("kv",)),
            Source(f"{_HF}self_attn.v_proj.bias", ("kv",)),
        ),
        trainer=(f"{_TRAINER}self_attention.linear_qkv.bias",),
        trainer_rule="grouped_qkv",
        engine=f"{_HF}self_attn.qkv_proj.bias",
        engine_rule="concat_qkv",
    ),
    Row(
        kind="dense",
        layers="moe",
        sources=(
            Source(f"{_SHARED}gate_proj.weight", ("shared_ffn", "hidden")),
            Source(f"{_SHARED}up_proj.weight", ("shared_ffn", "hidden")),
        ),
        trainer=(f"{_TRAINER}mlp.shared_experts.linear_fc1.weight",),
        trainer_rule="gated",
        engine=f"{_SHARED}gate_up_proj.weight",
        engine_rule="gated",
    ),
    Row(
        kind="dense",
        layers="moe",
        sources=(Source(f"{_SHARED}down_proj.weight", ("hidden", "shared_ffn")),),
        trainer=(f"{_TRAINER}mlp.shared_experts.linear_fc2.weight",),
        trainer_rule="row",
        engine=f"{_SHARED}down_proj.weight",
        engine_rule="row",
    ),
    Row(
        kind="dense",
        layers="moe",
        sources=(Source(f"{_HF}mlp.shared_expert_gate.weight", ("one", "hidden")),),
        trainer=(f"{_TRAINER}mlp.shared_experts.gate_weight",),
        trainer_rule="same",
        engine=f"{_HF}mlp.shared_expert_gate.weight",
        engine_rule="same",
    ),
)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `Qwen2MoeConfig`. ValueError names a field that is missing or that vLLM ignores."""
    shape = replace(qwen3_moe.read(config), family="qwen2_moe")
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
    return {**qwen3_moe.sizes(shape), "shared_ffn": shared, "one": 1}


FAMILY = Family(name="qwen2_moe", rows=ROWS, read=read, sizes=sizes, is_moe=qwen3_moe.is_moe)
