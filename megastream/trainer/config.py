"""The typed config of a trainer, and what can be said about it without Megatron: what divides, what is supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megastream.families.types import ModelShape

BUILT_FAMILIES = ("qwen2_moe", "qwen3_moe")
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
    """Width of the expert that every token passes, with a sigmoid gate of its own (Qwen2-MoE); 0: there is none."""
    rope_theta: float = 10_000.0
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
    router_expert_bias: bool = False
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
                f"{' and '.join(BUILT_FAMILIES)}; build the model with a training script of your own"
            )
        _refuse_fields(raw)
        rope = raw.get("rope_parameters") or raw
        qwen2 = shape.family == "qwen2_moe"
        model = dict(
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
            qk_norm=not qwen2,
            qkv_bias=qwen2,
            norm_top_k=bool(raw.get("norm_topk_prob", False)),
            shared_ffn=int(raw["shared_expert_intermediate_size"]) if qwen2 else 0,
            rope_theta=float(rope.get("rope_theta", cls.rope_theta)),
            norm_eps=float(raw.get("rms_norm_eps", cls.norm_eps)),
        )
        return cls(**{**model, **settings})


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
        (
            config.mtp_layers != 0,
            f"mtp_layers={config.mtp_layers}",
            "no family table has the weights of multi-token prediction layers",
            "set mtp_layers to 0",
        ),
        (
            config.router_expert_bias,
            "router_expert_bias=True",
            "it is no parameter, changes after the step, and no family table has it",
            "switch it off",
        ),
    )
    for refused, setting, reason, remedy in refusals:
        if refused:
            raise ValueError(f"trainer setting {setting} is not supported: {reason}; {remedy}")


def _refuse_fields(raw: Mapping[str, Any]) -> None:
    """Fields of config.json that say that the model computes something else than ours does."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    found: tuple[tuple[str, Any, Any], ...] = (
        ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
        ("attention_bias", raw.get("attention_bias", False), False),
        ("use_sliding_window", raw.get("use_sliding_window", False), False),
        ("mlp_only_layers", list(raw.get("mlp_only_layers") or ()), []),
        ("decoder_sparse_step", raw.get("decoder_sparse_step", 1), 1),
        ("rope_type", kind, "default"),
    )
    for name, value, supported in found:
        if value != supported:
            raise ValueError(
                f"config.json field {name}={value!r} is not supported by the trainer's own model, only {supported!r}; "
                "build the model with a training script of your own"
            )
