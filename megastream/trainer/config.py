"""The typed config of a trainer, and the arithmetic that says whether its layout divides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from megastream.families.types import ModelShape


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
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    dispatcher: Literal["allgather", "alltoall"] = "allgather"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    lr: float = 1e-3
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 1
    overlap_grad_reduce: bool = False
    ddp_bucket_elements: int | None = None
    """Megatron's own bucket size; it counts only together with `overlap_grad_reduce`, as in stock DDP."""

    @classmethod
    def of(cls, shape: ModelShape, **settings: Any) -> TrainerConfig:
        """The config that trains a Hugging Face model of this shape; `settings` are the remaining fields."""
        raw = shape.raw
        rope = raw.get("rope_parameters") or raw
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
            rope_theta=float(rope.get("rope_theta", cls.rope_theta)),
            norm_eps=float(raw.get("rms_norm_eps", cls.norm_eps)),
        )
        return cls(**{**model, **settings})


def check_layout(config: TrainerConfig, world_size: int) -> None:
    """ValueError with the axis and both numbers when something does not divide. Pure arithmetic."""
    etp = config.tp if config.etp is None else config.etp
    vpp = config.vpp or 1
    rules = (
        ("ranks", world_size, "tp*pp", config.tp * config.pp),
        ("ranks", world_size, "etp*ep*pp", etp * config.ep * config.pp),
        ("layers", config.layers, "pp*vpp" if vpp > 1 else "pp", config.pp * vpp),
        ("heads", config.heads, "tp", config.tp),
        ("kv_groups", config.kv_groups, "tp", config.tp),
        ("vocab", config.vocab, "tp", config.tp),
        ("max_sequence", config.max_sequence, "tp", config.tp),
        ("experts", config.experts, "ep", config.ep),
        ("expert_ffn", config.expert_ffn, "etp", etp),
        ("heads", config.heads, "kv_groups", config.kv_groups),
    )
    for thing, size, axis, parts in rules:
        if parts < 1 or size % parts:
            raise ValueError(f"layout does not divide: {thing}={size} by {axis}={parts}; change one of the two")
    if vpp > 1 and config.pp == 1:
        raise ValueError(f"vpp={vpp} needs pipeline stages, but pp=1; raise pp or leave vpp out")
