"""Qwen3-MoE."""

from __future__ import annotations

from megastream.families.config import number
from megastream.families.decoder import decoder_shape, decoder_sizes, refuse_unless
from megastream.families.family import Family
from megastream.families.rows import ATTENTION, DENSE_MLP, GATE_IN_EXPERTS, QK_NORM, ends, experts, router
from megastream.families.types import ModelShape

ROWS = (*ends(spares=True), *ATTENTION, *QK_NORM, router(), *experts(), *DENSE_MLP)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `Qwen3MoeConfig`. ValueError names a field that is missing or not a number."""
    refuse_unless("qwen3_moe", config, attention_bias=False)
    return read_moe("qwen3_moe", config)


def read_moe(family: str, config: dict[str, object]) -> ModelShape:
    """What Qwen2-MoE and Qwen3-MoE share. ValueError names a field that is missing or not a number."""
    shape = decoder_shape(
        family,
        config,
        # transformers 5 writes `num_local_experts`, earlier releases `num_experts`.
        num_experts=number(config, "num_experts", number(config, "num_local_experts", 0)),
        top_k=number(config, "num_experts_per_tok"),
        expert_ffn=number(config, "moe_intermediate_size"),
    )
    moe_layers = sum(is_moe(shape, layer) for layer in range(shape.num_layers))
    if moe_layers and not shape.num_experts:
        raise ValueError(f"config.json field num_experts is missing or 0, and {moe_layers} layers need experts")
    if moe_layers < shape.num_layers:
        number(config, "intermediate_size", least=1)
    return shape


def is_moe(shape: ModelShape, layer: int) -> bool:
    """transformers' rule: not in `mlp_only_layers`, and every `decoder_sparse_step`-th layer has experts."""
    dense = shape.raw.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise ValueError(f"config.json field mlp_only_layers is {dense!r}; expected a list of layers")
    return layer not in dense and (layer + 1) % max(number(shape.raw, "decoder_sparse_step", 1), 1) == 0


FAMILY = Family(
    name="qwen3_moe",
    rows=ROWS,
    read=read,
    sizes=decoder_sizes,
    is_moe=is_moe,
    aliases=(GATE_IN_EXPERTS,),
    has_eplb=True,
)
