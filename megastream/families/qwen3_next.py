"""Qwen3-Next: gated delta nets in most layers, gated attention in every fourth, a gated shared expert, and norms that
count from 1.

A key head and the value heads that it serves are a group. The files hold a delta net's inputs group by group (q, k, v
and z of a group, then the next; in a second tensor b and a), as vLLM does; Megatron holds all q of a rank, then all k,
and so on, in one parameter. The query projection of an attention layer is twice as wide: behind each head stands its
gate. vLLM keeps a head's gate behind it, Megatron puts a group's gates behind all its query heads.

Norms are whole everywhere and nothing is added to them: transformers, vLLM and Megatron with
`layernorm_zero_centered_gamma` multiply by 1 + weight. The norm behind a delta net is the exception, see `DIFFERS`.
A_log is fp32 in vLLM, and here in files, so that nothing of it is lost; dt_bias stays what it is. Not in the table: the
`mtp.*` tensors, which vLLM loads for speculative decoding only, and tied embeddings, for which vLLM has no code.
Qwen3.5 is another family: its files have other names and hold a delta net's q, k, v, z, b and a apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megastream.families.config import number
from megastream.families.decoder import refuse_unless
from megastream.families.family import Family
from megastream.families.qwen2_moe import SHARED_ALIASES, SHARED_EXPERT
from megastream.families.qwen2_moe import sizes as qwen2_sizes
from megastream.families.qwen3_moe import is_moe, read_moe
from megastream.families.rows import (
    DENSE_MLP,
    GATE_IN_EXPERTS,
    MLP_NORM,
    ends,
    engine_row,
    experts,
    hf,
    layer_row,
    linear,
    router,
    trainer_row,
)
from megastream.families.types import Layers, ModelShape, Row, Source

DIFFERS = (
    "Megatron keeps the norm behind a gated delta net less 1 (layernorm_zero_centered_gamma is for all norms), the "
    "files do not, and megastream moves weights without adding to them"
)

_EMBED, _NORM, _HEAD = ends(spares=True)
_QKVZ = replace(
    linear("linear_attn.in_proj_qkvz.weight", "qkvz", "hidden"),
    parts=("key_head", "key_head", "group_values", "group_values"),
)
_BA = replace(hf("linear_attn.in_proj_ba.weight", "ba", "hidden"), parts=("group_heads", "group_heads"))
_CONV = replace(hf("linear_attn.conv1d.weight", "conv", "one", "kernel"), parts=("keys", "keys", "values"))
_QKV = (
    linear("self_attn.q_proj.weight", "gated_q", "hidden"),
    linear("self_attn.k_proj.weight", "kv", "hidden"),
    linear("self_attn.v_proj.weight", "kv", "hidden"),
)


def _row(layers: Layers, source: Source, trainer: str, rule: str = "same", **more: Any) -> Row:
    return layer_row(layers, source, f"self_attention.{trainer}", rule, **more)


DELTA_NET = (
    trainer_row("delta", (_QKVZ, _BA), "self_attention.in_proj.weight", "ungrouped"),
    engine_row("delta", (_QKVZ,), "linear_attn.in_proj_qkvz.weight", "groups"),
    engine_row("delta", (_BA,), "linear_attn.in_proj_ba.weight", "groups"),
    _row("delta", _CONV, "conv1d.weight", "sections"),
    _row("delta", hf("linear_attn.dt_bias", "heads"), "dt_bias", "column"),
    _row("delta", hf("linear_attn.A_log", "heads"), "A_log", "column", fp32=("file", "engine")),
    _row("delta", hf("linear_attn.norm.weight", "value_head"), "out_norm.weight"),
    _row("delta", linear("linear_attn.out_proj.weight", "hidden", "values"), "out_proj.weight", "row"),
)
GATED_ATTENTION = (
    layer_row(
        "full",
        _QKV,
        "self_attention.linear_qkv.weight",
        "grouped_gated_qkv",
        engine="self_attn.qkv_proj.weight",
        engine_rule="concat_gated_qkv",
    ),
    _row("full", linear("self_attn.o_proj.weight", "hidden", "q"), "linear_proj.weight", "row"),
    _row("full", hf("self_attn.q_norm.weight", "head_norm"), "q_layernorm.weight"),
    _row("full", hf("self_attn.k_norm.weight", "head_norm"), "k_layernorm.weight"),
)
ROWS = (
    _EMBED,
    replace(_NORM, engine_spare=False),
    _HEAD,
    layer_row(
        "every",
        hf("input_layernorm.weight", "hidden"),
        ("input_layernorm.weight", *(f"self_attention.{into}.layer_norm_weight" for into in ("linear_qkv", "in_proj"))),
    ),
    *DELTA_NET,
    *GATED_ATTENTION,
    MLP_NORM,
    router(),
    *experts(),
    *SHARED_EXPERT,
    *DENSE_MLP,
)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `Qwen3NextConfig`. ValueError names a field that is missing or that no row is for."""
    refuse_unless(
        "qwen3_next",
        config,
        attention_bias=False,
        qkv_bias=False,
        attn_output_gate=True,
        layer_scale=False,
        tie_word_embeddings=False,
    )
    number(config, "shared_expert_intermediate_size", least=1)
    keys, values = (number(config, f"linear_num_{name}_heads", least=1) for name in ("key", "value"))
    if values % keys:
        raise ValueError(
            f"config.json field linear_num_value_heads is {values}, which linear_num_key_heads = {keys} does not divide"
        )
    for name in ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"):
        number(config, name, least=1)
    number(config, "full_attention_interval", 4, least=1)
    shape = read_moe("qwen3_next", config)
    _check_layer_types(shape)
    return shape


def is_delta(shape: ModelShape, layer: int) -> bool:
    """transformers' rule: as `layer_types` says, else every `full_attention_interval`-th layer has full attention."""
    if types := shape.raw.get("layer_types"):
        return bool(types[layer] == "linear_attention")
    return (layer + 1) % number(shape.raw, "full_attention_interval", 4) != 0


def _check_layer_types(shape: ModelShape) -> None:
    types = shape.raw.get("layer_types")
    known = ("linear_attention", "full_attention")
    if types and not (isinstance(types, list) and len(types) == shape.num_layers and all(t in known for t in types)):
        raise ValueError(
            f"config.json field layer_types is {types!r}; expected {' or '.join(known)} for each of {shape.num_layers} "
            "layers"
        )


def sizes(shape: ModelShape) -> dict[str, int]:
    """The numbers that the table's dims are written in."""
    usual = qwen2_sizes(shape)
    keys, values = (number(shape.raw, f"linear_num_{name}_heads") for name in ("key", "value"))
    key, value = (number(shape.raw, f"linear_{name}_head_dim") for name in ("key", "value"))
    return {
        **usual,
        "gated_q": 2 * usual["q"],
        "heads": values,
        "group_heads": values // keys,
        "group_values": values // keys * value,
        "key_head": key,
        "value_head": value,
        "keys": keys * key,
        "values": values * value,
        "qkvz": 2 * (keys * key + values * value),
        "ba": 2 * values,
        "conv": 2 * keys * key + values * value,
        "kernel": number(shape.raw, "linear_conv_kernel_dim"),
    }


FAMILY = Family(
    name="qwen3_next",
    rows=ROWS,
    read=read,
    sizes=sizes,
    is_moe=is_moe,
    is_delta=is_delta,
    trainer_differs=DIFFERS,
    drafts=("mtp.",),
    aliases=(GATE_IN_EXPERTS, *SHARED_ALIASES),
    has_eplb=True,
)
