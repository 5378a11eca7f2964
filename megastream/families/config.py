"""Reads single fields of a Hugging Face config.json, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping

LARGEST = {
    "num_hidden_layers": 1000,
    "hidden_size": 2**17,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "num_nextn_predict_layers": 64,
    "head_dim": 4096,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
    "n_shared_experts": 64,
    "first_k_dense_replace": 1000,
    "q_lora_rank": 2**16,
    "kv_lora_rank": 2**16,
    "qk_nope_head_dim": 4096,
    "qk_rope_head_dim": 4096,
    "v_head_dim": 4096,
    "num_experts_per_tok": 4096,
    "moe_intermediate_size": 2**18,
    "intermediate_size": 2**18,
    "shared_expert_intermediate_size": 2**18,
    "vocab_size": 2**24,
    "linear_num_key_heads": 4096,
    "linear_num_value_heads": 4096,
    "linear_key_head_dim": 4096,
    "linear_value_head_dim": 4096,
    "linear_conv_kernel_dim": 256,
    "full_attention_interval": 1000,
}
"""Far above any model there is; beyond it a number is a slip, and planning with it would not end."""


def number(config: Mapping[str, object], key: str, default: int | None = None, *, least: int = 0) -> int:
    """A whole number. ValueError names a field that is missing (and has no default), something else, or too large."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"config.json field {key} is {value!r}; expected a whole number")
    if value < least:
        raise ValueError(f"config.json field {key} is {value}; it must be at least {least}")
    if value > LARGEST.get(key, value):
        raise ValueError(f"config.json field {key} is {value}; it is at most {LARGEST[key]}")
    return value


def flag(config: Mapping[str, object], key: str) -> bool:
    """True or false; false when the field is missing."""
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json field {key} is {value!r}; expected true or false")
    return value
