"""GPT-OSS in bf16: biases everywhere, attention sinks, and experts that the checkpoint holds stacked and transposed,
with gate and up in turns.

Megatron has one parameter for each expert, gate above up; vLLM stacks them with rows of gate and up in turns, and gives
the bias behind the experts' sum to the first tensor-parallel rank only. The published checkpoints hold experts in MXFP4
and must be converted to bf16 before. Megatron's names are those of its local spec (softmax offset) and of
TEGroupedMLP; how Transformer Engine shapes the softmax offset was not seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megastream.families.config import number
from megastream.families.decoder import decoder_shape, decoder_sizes, only_experts
from megastream.families.family import Family
from megastream.families.rows import INPUT_NORM, MLP_NORM, ends, expert_linear, hf, layer_row, linear, qkv, router
from megastream.families.types import ModelShape, Row, Source

_EXPERTS = "mlp.experts."


def _gate_up(name: str, *dims: str) -> Source:
    """Gate and up take turns in the last dim of the file."""
    return replace(hf(_EXPERTS + name, *dims, "expert_ffn", "two"), joined=2)


def _stacked(source: Source, megatron: str, trainer_rule: str, engine: str, engine_rule: str) -> Row:
    names = expert_linear(megatron, engine.rpartition("_")[2])
    more: dict[str, Any] = dict(kind="expert", engine_stacked=True, engine_rule=engine_rule)
    return layer_row("moe", source, names, trainer_rule, engine=f"{_EXPERTS}routed_experts.{engine}", **more)


GATE_UP, GATE_UP_BIAS = _gate_up("gate_up_proj", "experts", "hidden"), _gate_up("gate_up_proj_bias", "experts")
DOWN = hf(f"{_EXPERTS}down_proj", "experts", "expert_ffn", "hidden")
DOWN_BIAS = hf(f"{_EXPERTS}down_proj_bias", "experts", "hidden")
OUTPUT, OUTPUT_BIAS = linear("self_attn.o_proj.weight", "hidden", "q"), hf("self_attn.o_proj.bias", "hidden")
SINKS, _OFFSET = hf("self_attn.sinks", "heads"), "self_attention.core_attention.softmax_offset"

ROWS = (
    *ends(spares=True, embed="model.embedding.weight"),
    INPUT_NORM,
    qkv("weight", ("q", "kv"), "hidden", engine="attn.qkv_proj."),
    qkv("bias", ("q", "kv"), engine="attn.qkv_proj."),
    layer_row("every", OUTPUT, "self_attention.linear_proj.weight", "row", engine="attn.o_proj.weight"),
    layer_row("every", OUTPUT_BIAS, "self_attention.linear_proj.bias", engine="attn.o_proj.bias"),
    layer_row("every", SINKS, _OFFSET, "column", engine="attn.sinks"),
    MLP_NORM,
    router("mlp.router.weight"),
    layer_row("moe", hf("mlp.router.bias", "experts"), "mlp.router.bias"),
    _stacked(GATE_UP, "linear_fc1", "stack_gated", "w13_weight", "stack_interleaved"),
    _stacked(GATE_UP_BIAS, "linear_fc1", "stack_gated", "w13_bias", "stack_interleaved"),
    _stacked(DOWN, "linear_fc2", "stack_row", "w2_weight", "stack_row"),
    _stacked(DOWN_BIAS, "linear_fc2", "stack_same", "w2_bias", "stack_first"),
)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `GptOssConfig`. ValueError names a field that is missing or not a number."""
    return decoder_shape(
        "gpt_oss",
        config,
        num_experts=number(config, "num_local_experts", least=1),
        top_k=number(config, "num_experts_per_tok"),
        expert_ffn=number(config, "intermediate_size"),
    )


def sizes(shape: ModelShape) -> dict[str, int]:
    """The numbers that the table's dims are written in."""
    return {**decoder_sizes(shape), "heads": shape.num_heads, "two": 2}


FAMILY = Family(name="gpt_oss", rows=ROWS, read=read, sizes=sizes, is_moe=only_experts, attention="attn.attn")
