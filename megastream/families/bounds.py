"""What every model shape must hold to, whatever its family: sizes that exist, and that fit each other."""

from __future__ import annotations

from megastream.families.types import ModelShape


def check_shape(shape: ModelShape) -> ModelShape:
    """The shape itself. ValueError names the field of config.json that is 0 or does not fit another one."""
    for key, value in _fields(shape).items():
        if value < 1:
            raise ValueError(f"config.json field {key} is {value}; it must be above 0")
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"config.json field num_attention_heads is {shape.num_heads}, which num_key_value_heads = "
            f"{shape.num_kv_heads} does not divide"
        )
    if shape.num_experts and shape.top_k > shape.num_experts:
        raise ValueError(
            f"config.json field num_experts_per_tok is {shape.top_k}, and num_experts is {shape.num_experts}"
        )
    for layer in shape.raw.get("mlp_only_layers") or ():
        if type(layer) is not int or not 0 <= layer < shape.num_layers:
            raise ValueError(
                f"config.json field mlp_only_layers has {layer!r}; the model has layers 0 to {shape.num_layers - 1}"
            )
    return shape


def _fields(shape: ModelShape) -> dict[str, int]:
    sizes = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
    }
    if shape.num_experts:
        sizes |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.expert_ffn,
        }
    return sizes
