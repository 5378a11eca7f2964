"""The typed config of a trainer, and what can be said about it without Megatron: what divides, what is supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megastream.families import family_of
from megastream.families.decoder import shared_ffn
from megastream.families.types import ModelShape

BUILT_FAMILIES = ("glm4_moe", "qwen2_moe", "qwen3_moe")
"""Families whose models `gpt.py` builds; a trainer with a model of its own can stream any that has a table."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Model, layout and optimizer of one trainer. Sizes are global; `etp` defaults to `tp`, as in Megatron."""

    layers: int
    hidden: int
    heads: int
    kv_groups: int
    head_dim: int
    experts: int
    top_k: int
    expert_ffn: int
    vocab: int
    max_sequence: int
    tied: bool = False
    qk_norm: bool = True
    """A norm on the heads of queries and keys (Qwen3)."""
    qkv_bias: bool = False
    """Biases of the query, key and value projections (Qwen2)."""
    norm_top_k: bool = True
    """Whether the probabilities of a token's chosen experts are scaled to a sum of 1."""
    shared_ffn: int = 0
    """Width of the expert that every token passes; 0: there is none."""
    shared_gate: bool = True
    """Whether that expert has a sigmoid gate of its own (Qwen2-MoE)."""
    dense_layers: int = 0
    """So many layers at the beginning have a dense MLP of width `dense_ffn` instead of experts (GLM-4.5-MoE)."""
    dense_ffn: int = 0
    router_expert_bias: bool = False
    """Sigmoid scores in fp32, to each of which a bias is added for the choice of experts alone (GLM-4.5-MoE)."""
    router_bias_rate: float = 1e-3
    """By how much a step moves that bias: up for experts that got fewer tokens than the mean, down for others."""
    router_scale: float = 1.0
    """What the chosen experts' scaled scores are multiplied with, where the router has such a bias."""
    rope_theta: float = 10_000.0
    rope_part: float = 1.0
    """Part of a head's dims that is rotated."""
    norm_eps: float = 1e-6
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    cp: int = 1
    """Context parallelism: the ranks that share a sequence, each with two of its 2*cp parts."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each pipeline stage; with `vpp`, of each virtual one in the order in which a token passes them.

    The embedding stands in front of the first, norm and head behind the last, so these two may have 0 layers of their
    own. Without it all stages have equally many.
    """
    mtp_layers: int = 0
    """Layers of multi-token prediction behind the last one (GLM-4.5-MoE). They are trained and saved, with a tenth of
    the loss; no engine takes them."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward: none, those of the attention's core, or all of a layer's."""
    per_token_loss: bool = False
    """Every token of a step weighs the same; otherwise every microbatch does, however many of its tokens count."""
    dispatcher: Literal["allgather", "alltoall"] = "allgather"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    lr: float = 1e-3
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 1
    overlap_grad_reduce: bool = False
    ddp_bucket_elements: int | None = None
    """Megatron's own bucket size; it counts only together with `overlap_grad_reduce`, as in stock DDP."""

    @property
    def virtual_stages(self) -> int | None:
        """Virtual stages of a rank as Megatron wants the number: None when it is 1."""
        return self.vpp if (self.vpp or 1) > 1 else None

    @classmethod
    def of(cls, shape: ModelShape, **settings: Any) -> TrainerConfig:
        """The config that trains a Hugging Face model of this shape; `settings` are the remaining fields.

        ValueError names a family that it does not build, or a field of config.json that its model does not have.
        """
        raw = shape.raw
        if shape.family not in BUILT_FAMILIES:
            raise ValueError(
                f"model family {shape.family} is not built by the trainer's own model, only "
                f"{', '.join(BUILT_FAMILIES[:-1])} and {BUILT_FAMILIES[-1]}; build the model with a training script of "
                f"your own"
            )
        _refuse_fields(shape)
        _refuse_quantized(raw)
        if settings.get("mtp_layers") and not family_of(shape).has_mtp:
            raise ValueError(
                f"trainer setting mtp_layers={settings['mtp_layers']} is not supported: the table of family "
                f"{shape.family} has no rows for multi-token prediction; set mtp_layers to 0"
            )
        rope = _section(raw, "rope_parameters") or raw  # newer files have a section of their own
        model: dict[str, Any] = dict(
            layers=shape.num_layers,
            hidden=shape.hidden,
            heads=shape.num_heads,
            kv_groups=shape.num_kv_heads,
            head_dim=shape.head_dim,
            experts=shape.num_experts,
            top_k=shape.top_k,
            expert_ffn=shape.expert_ffn,
            vocab=shape.vocab,
            tied=shape.tied,
            norm_top_k=bool(raw.get("norm_topk_prob", False)),
            rope_theta=_number(rope, "rope_theta", cls.rope_theta),
            norm_eps=_number(raw, "rms_norm_eps", cls.norm_eps),
        )
        return cls(**{**model, **_FAMILY_FIELDS[shape.family](shape), **settings})


def _glm4_fields(shape: ModelShape) -> dict[str, Any]:
    raw = shape.raw
    return dict(
        qk_norm=bool(raw.get("use_qk_norm", False)),
        qkv_bias=bool(raw.get("attention_bias", False)),
        norm_top_k=True,
        shared_ffn=shared_ffn(shape),
        shared_gate=False,
        dense_layers=min(int(_number(raw, "first_k_dense_replace", 0)), shape.num_layers),
        dense_ffn=int(_number(raw, "intermediate_size")),
        router_expert_bias=True,
        router_scale=_number(raw, "routed_scaling_factor", 1.0),
        rope_part=_number(
            _section(raw, "rope_parameters"), "partial_rotary_factor", _number(raw, "partial_rotary_factor", 0.5)
        ),
    )


def _qwen2_fields(shape: ModelShape) -> dict[str, Any]:
    return dict(qk_norm=False, qkv_bias=True, shared_ffn=int(_number(shape.raw, "shared_expert_intermediate_size")))


_FAMILY_FIELDS: dict[str, Callable[[ModelShape], dict[str, Any]]] = {
    "glm4_moe": _glm4_fields,
    "qwen2_moe": _qwen2_fields,
    "qwen3_moe": lambda shape: {},
}
"""What a family has beside the fields that all of them share; see `TrainerConfig.of`."""


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json field {name} is {value!r}, an object is wanted")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"config.json field {name} is {value!r}, a number is wanted")
    return float(value)


def _refuse_quantized(raw: Mapping[str, Any]) -> None:
    if quantized := raw.get("quantization_config"):
        method = quantized.get("quant_method", "of unknown method") if isinstance(quantized, Mapping) else quantized
        raise ValueError(
            f"config.json field quantization_config ({method}) is not supported: weights are loaded without scales; "
            "convert the checkpoint to bfloat16 first"
        )


def check_layout(config: TrainerConfig, world_size: int) -> None:
    """ValueError in one line: a feature that is not supported, or the axis and both numbers of what does not divide."""
    _refuse_features(config)
    etp = config.tp if config.etp is None else config.etp
    vpp = config.vpp or 1
    even = () if config.stage_layers else (("layers", config.layers, "pp*vpp" if vpp > 1 else "pp", config.pp * vpp),)
    tp = ("tp", config.tp)
    replica = ("tp*cp*pp" if config.cp > 1 else "tp*pp", config.tp * config.cp * config.pp)
    rules = (
        ("ranks", world_size, *replica),
        ("ranks", world_size, "etp*ep*pp", etp * config.ep * config.pp),
        *even,
        ("heads", config.heads, *tp),
        ("kv_groups", config.kv_groups, *tp),
        ("vocab", config.vocab, *tp),
        ("max_sequence", config.max_sequence, *(("tp*2*cp", 2 * config.tp * config.cp) if config.cp > 1 else tp)),
        ("experts", config.experts, "ep", config.ep),
        ("expert_ffn", config.expert_ffn, "etp", etp),
        ("shared_ffn", config.shared_ffn, *tp),
        ("dense_ffn", config.dense_ffn, *tp),
        ("heads", config.heads, "kv_groups", config.kv_groups),
    )
    for thing, size, axis, parts in rules:
        if parts < 1 or size % parts:
            raise ValueError(f"layout does not divide: {thing}={size} by {axis}={parts}; change one of the two")
    if vpp > 1 and config.pp == 1:
        raise ValueError(f"vpp={vpp} needs pipeline stages, but pp=1; raise pp or leave vpp out")
    if config.stage_layers:
        _check_stages(config.stage_layers, config.layers, config.pp, vpp)


def _check_stages(stages: tuple[int, ...], layers: int, pp: int, vpp: int) -> None:
    if len(stages) != pp * vpp:
        raise ValueError(f"stage_layers={list(stages)} does not fit pp={pp}, vpp={vpp}; give {pp * vpp} numbers")
    if min(stages) < 0 or 0 in stages[1:-1]:
        raise ValueError(f"stage_layers={list(stages)} has a stage with nothing on it; only the ends may have 0 layers")
    if sum(stages) != layers:
        raise ValueError(
            f"stage_layers={list(stages)} has {sum(stages)} layers, the model {layers}; change one of them"
        )


def _refuse_features(config: TrainerConfig) -> None:
    refusals = (
        (config.tied, "with a tied head Megatron leaves a second one on the last stage, which is never trained"),
        (config.cp > 1, "it was never run here with context parallelism"),
        (config.stage_layers and config.stage_layers[-1] == 0, "the last stage needs a layer of its own beside it"),
    )
    for refused, reason in refusals:
        if config.mtp_layers and refused:
            raise ValueError(
                f"trainer setting mtp_layers={config.mtp_layers} is not supported: {reason}; set mtp_layers to 0"
            )


def _refuse_fields(shape: ModelShape) -> None:
    """Fields of config.json that say that the model computes something else than ours does."""
    raw = shape.raw
    rope = _section(raw, "rope_parameters") or _section(raw, "rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    found: list[tuple[str, Any, Any]] = [
        ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
        ("use_sliding_window", raw.get("use_sliding_window", False), False),
        ("mlp_only_layers", list(raw.get("mlp_only_layers") or ()), []),
        ("decoder_sparse_step", raw.get("decoder_sparse_step", 1), 1),
        ("rope_type", kind, "default"),
    ]
    if shape.family == "glm4_moe":  # groups of experts are scored otherwise by Megatron than by transformers
        found += [(name, raw.get(name, 1), 1) for name in ("n_group", "topk_group", "moe_layer_freq")]
        found.append(("norm_topk_prob", raw.get("norm_topk_prob", True), True))
    else:
        found.append(("attention_bias", raw.get("attention_bias", False), False))
    for name, value, supported in found:
        if value != supported:
            raise ValueError(
                f"config.json field {name}={value!r} is not supported by the trainer's own model, only {supported!r}; "
                "build the model with a training script of your own"
            )
