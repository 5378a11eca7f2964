"""Qwen3-MoE: one row per parameter, with its Hugging Face, Megatron and vLLM names and how each side lays it out."""

from __future__ import annotations

from megastream.families.config import flag, number
from megastream.families.family import Family
from megastream.families.types import ModelShape, Row, Source

_HF = "model.layers.{layer}."
_TRAINER = "decoder.layers.{layer}."
_EMBED = Source("model.embed_tokens.weight", ("vocab", "hidden"))


def _expert(projection: str, dims: tuple[str, str]) -> Source:
    return Source(f"{_HF}mlp.experts.{{expert}}.{projection}.weight", dims)


def _experts(linear: str) -> tuple[str, ...]:
    """Names of an expert's linear in Megatron: SequentialMLP, then TEGroupedMLP (expert index behind `weight`)."""
    return (
        f"{_TRAINER}mlp.experts.local_experts.{{expert}}.{linear}.weight",
        f"{_TRAINER}mlp.experts.{linear}.weight{{expert}}",
    )


ROWS = (
    Row(
        kind="embed",
        layers="none",
        sources=(_EMBED,),
        trainer=("embedding.word_embeddings.weight",),
        trainer_rule="vocab",
        engine="model.embed_tokens.weight",
        engine_rule="vocab",
    ),
    Row(
        kind="dense",
        layers="every",
        sources=(Source(f"{_HF}input_layernorm.weight", ("hidden",)),),
        trainer=(f"{_TRAINER}input_layernorm.weight", f"{_TRAINER}self_attention.linear_qkv.layer_norm_weight"),
        trainer_rule="same",
        engine=f"{_HF}input_layernorm.weight",
        engine_rule="same",
    ),
    Row(
        kind="dense",
        layers="every",
        sources=(
            Source(f"{_HF}self_attn.q_proj.weight", ("q", "hidden")),
            Source(f"{_HF}self_attn.k_proj.weight", ("kv", "hidden")),
            Source(f"{_HF}self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        trainer=(f"{_TRAINER}self_attention.linear_qkv.weight",),
        trainer_rule="grouped_qkv",
        engine=f"{_HF}self_attn.qkv_proj.weight",
        engine_rule="concat_qkv",
    ),
    Row(
        kind="dense",
        layers="every",
        sources=(Source(f"{_HF}self_attn.q_norm.weight", ("head_dim",)),),
        trainer=(f"{_TRAINER}self_attention.q_layernorm.weight",),
        trainer_rule="same",
        engine=f"{_HF}self_attn.q_norm.weight",
        engine_rule="same",
    ),
    Row(
        kind="dense",
        layers="every",
        sources=(Source(f"{_HF}self_attn.k_norm.weight", ("head_dim",)),),
        trainer=(f"{_TRAINER}self_attention.k_layernorm.weight",),
        trainer_rule="same",
        engine=f"{_HF}self_attn.k_norm.weight",
        engine_rule="same",
    ),
    Row(
        kind="dense",
        layers="every",
        sources=(Source(f"{_HF}self_attn.o_proj.weight", ("hidden", "q")),),
        trainer=(f"{_TRAINER}self_attention.linear_proj.weight",),
        trainer_rule="row",
        engine=f"{_HF}self_attn.o_proj.weight",
        engine_rule="row",
    ),
    Row(
        kind="dense",
        layers="every",
        sources=(Source(f"{_HF}post_attention_layernorm.weight", ("hidden",)),),
        trainer=(f"{_TRAINER}pre_mlp_layernorm.weight", f"{_TRAINER}mlp.linear_fc1.layer_norm_weight"),
        trainer_rule="same",
        engine=f"{_HF}post_attention_layernorm.weight",
        engine_rule="same",
    ),
    Row(
        kind="dense",
        layers="moe",
        sources=(Source(f"{_HF}mlp.gate.weight", ("experts", "hidden")),),
        trainer=(f"{_TRAINER}mlp.router.weight",),
        trainer_rule="same",
        engine=f"{_HF}mlp.gate.weight",
        engine_rule="same",
    ),
    Row(
        kind="expert",
        layers="moe",
        sources=(_expert("gate_proj", ("expert_ffn", "hidden")), _expert("up_proj", ("expert_ffn", "hidden"))),
        trainer=_experts("linear_fc1"),
        trainer_rule="gated",
        engine=f"{_HF}mlp.experts.routed_experts.w13_weight",
        engine_rule="gated",
        engine_stacked=True,
    ),
    Row(
        kind="expert",
        layers="moe",
        sources=(_expert("down_proj", ("hidden", "expert_ffn")),),
        trainer=_experts("linear_fc2"),
        trainer_rule="row",
        engine=f"{_HF}mlp.experts.routed_experts.w2_weight",
        engine_rule="row",
        engine_stacked=True,
    ),
    Row(
        kind="dense",
        layers="dense",
        sources=(
            Source(f"{_HF}mlp.gate_proj.weight", ("dense_ffn", "hidden")),
            Source(f"{_HF}mlp.up_proj.weight", ("dense_ffn", "hidden")),
        ),
        trainer=(f"{_TRAINER}mlp.linear_fc1.weight",),
        trainer_rule="gated",
        engine=f"{_HF}mlp.gate_up_proj.weight",
        engine_rule="gated",
    ),
    Row(
        kind="dense",
        layers="dense",
        sources=(Source(f"{_HF}mlp.down_proj.weight", ("hidden", "dense_ffn")),),
        trainer=(f"{_TRAINER}mlp.linear_fc2.weight",),
        trainer_rule="row",
        engine=f"{_HF}mlp.down_proj.weight",
        engine_rule="row",
    ),
    Row(
        kind="norm",
        layers="none",
        sources=(Source("model.norm.weight", ("hidden",)),),
        trainer=("decoder.final_layernorm.weight",),
        trainer_rule="same",
        engine="model.norm.weight",
        engine_rule="same",
    ),
    Row(
        kind="head",
        layers="none",
        sources=(Source("lm_head.weight", ("vocab", "hidden")),),
        trainer=("output_layer.weight",),
        trainer_rule="vocab",
        engine="lm_head.weight",
        engine_rule="vocab",
        tied_to=_EMBED,
    ),
)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `Qwen3MoeConfig`. ValueError names a field that is missing or not a number."""
    hidden, num_heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    if not num_heads:
        raise ValueError("config.json field num_attention_heads is 0; it must be above 0")
    # transformers 5 writes `num_local_experts`, earlier releases `num_experts`.
    num_experts = number(config, "num_experts", number(config, "num_local_experts", 0))
    shape = ModelShape(
        family="qwen3_moe",
        num_layers=number(config, "num_hidden_layers"),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=number(config, "num_key_value_heads", num_heads),
        head_dim=number(config, "head_dim", hidden // num_heads),
        num_experts=num_experts,
        top_k=number(config, "num_experts_per_tok"),
        expert_ffn=number(config, "moe_intermediate_size"),
        vocab=number(config, "vocab_size"),
        tied=flag(config, "tie_word_embeddings"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        raw=dict(config),
    )
    moe_layers = sum(is_moe(shape, layer) for layer in range(shape.num_layers))
    if moe_layers and not num_experts:
        raise ValueError(f"config.json field num_experts is missing or 0, and {moe_layers} layers need experts")
    if moe_layers < shape.num_layers:
        number(config, "intermediate_size")
    return shape


def sizes(shape: ModelShape) -> dict[str, int]:
    """The numbers that the table's dims are written in."""
    return {
        "vocab": shape.vocab,
        "hidden": shape.hidden,
        "q": shape.num_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
        "head_dim": shape.head_dim,
        "experts": shape.num_experts,
        "expert_ffn": shape.expert_ffn,
        "dense_ffn": number(shape.raw, "intermediate_size", 0),
    }


def is_moe(shape: ModelShape, layer: int) -> bool:
    """transformers' rule: not in `mlp_only_layers`, and every `decoder_sparse_step`-th layer has experts."""
    dense = shape.raw.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise ValueError(f"config.json field mlp_only_layers is {dense!r}; expected a list of layers")
    return layer not in dense and (layer + 1) % max(number(shape.raw, "decoder_sparse_step", 1), 1) == 0


FAMILY = Family(name="qwen3_moe", rows=ROWS, read=read, sizes=sizes, is_moe=is_moe)
