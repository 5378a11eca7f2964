"""The rows that many families share, so that each family's file reads as a table of what is its own.

Names are given inside a layer: `self_attn.o_proj.weight` stands for `model.layers.{layer}.self_attn.o_proj.weight`,
on Megatron's side for `decoder.layers.{layer}.…`. vLLM's names, layouts and what it keeps on which pipeline stage are
those of its model files; Megatron's are those of its GPT layer specs, first the local one, then Transformer Engine's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megastream.families.types import Layers, Row, Source

_HF = "model.layers.{layer}."
_TRAINER = "decoder.layers.{layer}."


def hf(name: str, *dims: str) -> Source:
    """A Hugging Face tensor of a layer and the sizes of its dims."""
    return Source(_HF + name, dims)


def linear(name: str, *dims: str) -> Source:
    """The weight of a linear; see `Source`."""
    return Source(_HF + name, dims, linear=True)


def layer_row(
    layers: Layers,
    sources: Source | tuple[Source, ...],
    trainer: str | tuple[str, ...],
    rule: str = "same",
    *,
    engine: str = "",
    engine_rule: str = "",
    **more: Any,
) -> Row:
    """One parameter of a layer. The engine has the (first) source's name and the trainer's rule unless it is said."""
    sources = (sources,) if isinstance(sources, Source) else sources
    names = (trainer,) if isinstance(trainer, str) else trainer
    return Row(
        kind=more.pop("kind", "dense"),
        layers=layers,
        sources=sources,
        trainer=tuple(_TRAINER + name for name in names),
        trainer_rule=rule,
        engine=_HF + engine if engine else sources[0].name,
        engine_rule=engine_rule or rule,
        **more,
    )


def trainer_row(layers: Layers, sources: Source | tuple[Source, ...], trainer: str | tuple[str, ...], rule: str) -> Row:
    """A parameter whose tensors the engine fuses with others, or keeps apart."""
    return replace(layer_row(layers, sources, trainer, rule), engine="")


def engine_row(layers: Layers, sources: tuple[Source, ...], engine: str, rule: str = "same") -> Row:
    """A parameter whose tensors the trainer keeps in others."""
    return layer_row(layers, sources, (), rule, engine=engine)


def ends(*, spares: bool, embed: str = "model.embed_tokens.weight") -> tuple[Row, ...]:
    """Embedding (`embed`: vLLM's name), final norm and head. `spares`: vLLM has all three on every pipeline stage."""
    table = Source("model.embed_tokens.weight", ("vocab", "hidden"))
    head = Source("lm_head.weight", ("vocab", "hidden"))
    norm = Source("model.norm.weight", ("hidden",))
    return (
        replace(_end("embed", table, "embedding.word_embeddings.weight", "vocab", spares), engine=embed),
        _end("norm", norm, "decoder.final_layernorm.weight", "same", spares),
        _end("head", head, "output_layer.weight", "vocab", spares, tied_to=table),
    )


def _end(kind: Any, source: Source, trainer: str, rule: str, spare: bool, **more: Any) -> Row:
    return Row(kind, "none", (source,), (trainer,), rule, source.name, rule, engine_spare=spare, **more)


def mlp(layers: Layers, prefix: str, ffn: str, trainer: str) -> tuple[Row, ...]:
    """A gated MLP, `prefix` on Hugging Face's and vLLM's side, that tensor parallelism cuts: dense or shared expert."""
    gate, up = (linear(f"{prefix}{name}_proj.weight", ffn, "hidden") for name in ("gate", "up"))
    down = linear(f"{prefix}down_proj.weight", "hidden", ffn)
    return (
        layer_row(layers, (gate, up), f"{trainer}linear_fc1.weight", "gated", engine=f"{prefix}gate_up_proj.weight"),
        layer_row(layers, down, f"{trainer}linear_fc2.weight", "row"),
    )


def experts(prefix: str = "mlp.experts.", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Any:
    """Routed experts, one Hugging Face tensor each; `names` are those of gate, up and down. vLLM stacks them."""
    gate, up = (linear(f"{prefix}{{expert}}.{name}.weight", "expert_ffn", "hidden") for name in names[:2])
    down = linear(f"{prefix}{{expert}}.{names[2]}.weight", "hidden", "expert_ffn")
    stacked: dict[str, Any] = dict(kind="expert", engine_stacked=True)
    fc1, fc2 = expert_linear("linear_fc1"), expert_linear("linear_fc2")
    return (
        layer_row("moe", (gate, up), fc1, "gated", engine=f"{prefix}routed_experts.w13_weight", **stacked),
        layer_row("moe", down, fc2, "row", engine=f"{prefix}routed_experts.w2_weight", **stacked),
    )


def expert_linear(linear: str, what: str = "weight") -> tuple[str, ...]:
    """Megatron's names of an expert's linear: SequentialMLP, then TEGroupedMLP (expert index behind `weight`)."""
    return f"mlp.experts.local_experts.{{expert}}.{linear}.{what}", f"mlp.experts.{linear}.{what}{{expert}}"


def router(name: str = "mlp.gate.weight", **more: Any) -> Row:
    """The router's weight."""
    return layer_row("moe", hf(name, "experts", "hidden"), "mlp.router.weight", **more)


def qkv(what: str, sizes: tuple[str, str], *dims: str, engine: str = "self_attn.qkv_proj.") -> Row:
    """Queries, keys and values in one parameter; `sizes` of the queries' rows and of the others'."""
    source = linear if what == "weight" else hf
    sources = tuple(
        source(f"self_attn.{name}_proj.{what}", size, *dims)
        for name, size in zip("qkv", (*sizes, sizes[1]), strict=True)
    )
    trainer = f"self_attention.linear_qkv.{what}"
    return layer_row("every", sources, trainer, "grouped_qkv", engine=engine + what, engine_rule="concat_qkv")


INPUT_NORM = layer_row(
    "every",
    hf("input_layernorm.weight", "hidden"),
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
)
MLP_NORM = layer_row(
    "every",
    hf("post_attention_layernorm.weight", "hidden"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
)
QKV = qkv("weight", ("q", "kv"), "hidden")
QKV_BIAS = qkv("bias", ("q_bias", "kv_bias"))
OUTPUT = layer_row(
    "every", linear("self_attn.o_proj.weight", "hidden", "q"), "self_attention.linear_proj.weight", "row"
)
QK_NORM = (
    layer_row("every", hf("self_attn.q_norm.weight", "head_norm"), "self_attention.q_layernorm.weight"),
    layer_row("every", hf("self_attn.k_norm.weight", "head_norm"), "self_attention.k_layernorm.weight"),
)
CORRECTION_BIAS = layer_row(
    "moe",
    hf("mlp.gate.e_score_correction_bias", "experts"),
    "mlp.router.expert_bias",
    kind="late",
    fp32=("file", "trainer", "engine"),
)
"""Added to the router's scores for choosing experts only. Megatron changes it behind the optimizer's step."""
ATTENTION = (INPUT_NORM, QKV, OUTPUT, MLP_NORM)
"""Grouped-query attention between its two norms, without biases."""
SHARED_EXPERTS = mlp("moe", "mlp.shared_experts.", "shared_ffn", "mlp.shared_experts.")
DENSE_MLP = mlp("dense", "mlp.", "dense_ffn", "mlp.")
MTP = (
    *(
        trainer_row("mtp", hf(f"{name}.weight", "hidden"), f"{megatron}.weight", "same")
        for name, megatron in (("enorm", "enorm"), ("hnorm", "hnorm"), ("shared_head.norm", "final_layernorm"))
    ),
    trainer_row("mtp", hf("eh_proj.weight", "hidden", "two_hidden"), "eh_proj.weight", "column"),
)
"""What a layer of multi-token prediction has beside a decoder layer. Canonical names count it behind the decoder's
(Megatron's are `mtp.layers.0.enorm.weight`, `mtp.layers.0.transformer_layer.…`). Its embedding and its head are the
model's own; a checkpoint may hold them again as `embed_tokens` and `shared_head.head`."""

GATE_IN_EXPERTS = ("mlp.gate.", "mlp.experts.gate.")
"""vLLM hands the router to some models' experts, and shared experts to all: each of them has two names there."""
SHARED_IN_EXPERTS = "mlp.experts._shared_experts._layer."
