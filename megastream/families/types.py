"""What a family table says about a model. One declarative table per family; everything else reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["dense", "expert", "late", "embed", "norm", "head"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a Hugging Face tensor belongs: its kind, its global layer (None outside layers), its global expert."""

    kind: Kind
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a HF config.json that layouts need. `raw` keeps the file as it was read."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_ffn: int
    vocab: int
    tied: bool
    dtype: str
    raw: dict[str, Any]
