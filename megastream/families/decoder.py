"""Shape of a decoder with grouped-query attention, as nearly all families write it into their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megastream.families.config import flag, number
from megastream.families.types import ModelShape


def decoder_shape(family: str, config: dict[str, object], **experts: int) -> ModelShape:
    """Shape from the usual fields; `experts` gives num_experts, top_k and expert_ffn of a family that has them.

    ValueError names a field that is missing or not a number.
    """
    hidden, num_heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    if not num_heads:
        raise ValueError("config.json field num_attention_heads is 0; it must be above 0")
    return ModelShape(
        family=family,
        num_layers=number(config, "num_hidden_layers"),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=number(config, "num_key_value_heads", num_heads),
        head_dim=number(config, "head_dim", hidden // num_heads),
        vocab=number(config, "vocab_size"),
        tied=flag(config, "tie_word_embeddings"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        raw=dict(config),
        **{"num_experts": 0, "top_k": 0, "expert_ffn": 0, **experts},
    )


def decoder_sizes(shape: ModelShape) -> dict[str, int]:
    """The numbers that the dims of the shared rows are written in."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "vocab": shape.vocab,
        "hidden": shape.hidden,
        "two_hidden": 2 * shape.hidden,
        "q": q,
        "kv": kv,
        "q_bias": q,
        "kv_bias": kv,
        "head_norm": shape.head_dim,
        "experts": shape.num_experts,
        "expert_ffn": shape.expert_ffn,
        "dense_ffn": number(shape.raw, "intermediate_size", 0),
    }


def refuse_unless(family: str, config: Mapping[str, Any], **fixed: object) -> None:
    """ValueError names the first field that has another value than the one that the family's table is for."""
    for key, value in fixed.items():
        if (found := config.get(key, value)) not in (value, None):
            raise ValueError(f"config.json field {key} is {found!r}; {family} has a table for {value!r} only")


def no_experts(shape: ModelShape, layer: int) -> bool:
    """For families without experts."""
    return False


def only_experts(shape: ModelShape, layer: int) -> bool:
    """For families whose layers all have experts."""
    return True


def behind_dense(shape: ModelShape, layer: int) -> bool:
    """For families whose first layers are dense; vLLM's rule."""
    first = number(shape.raw, "first_k_dense_replace", 0)
    return layer >= first and layer % number(shape.raw, "moe_layer_freq", 1, least=1) == 0


def shared_ffn(shape: ModelShape) -> int:
    """Width of all shared experts of a layer together; 0: there are none."""
    return number(shape.raw, "n_shared_experts", 0) * shape.expert_ffn


def expert_groups(shape: ModelShape, default: int) -> int:
    """Groups of experts; `default`: of transformers' configuration of the family."""
    return number(shape.raw, "n_group", default)
