"""What a family table says about a model. One declarative table per family; everything else reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from megastream.layout.naming import Kind

Holder = Literal["file", "trainer", "engine"]
Layers = Literal["none", "every", "moe", "dense", "full", "delta", "mtp"]
"""Which layers have a row: none (embedding, final norm, head), all, only those with or without experts, only those with
full attention or with a gated delta net, or those of multi-token prediction, which are counted behind the decoder's and
have the rows of a decoder layer, too."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a Hugging Face tensor belongs: its kind, its global layer (None outside layers), its global expert.

    A tensor of kind `expert` without a number holds all experts of its layer, one at each index of dim 0.
    """

    kind: Kind
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a HF config.json that layouts need. `raw` keeps the file as it was read, `known` what its family
    worked out of these numbers.

    `mtp_layers` are those of multi-token prediction that a trainer, or weights in files, have. No engine that can be
    streamed to computes with them, so a shape that is read from a config.json has none at first.
    """

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
    mtp_layers: int = 0
    known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Source:
    """A Hugging Face tensor: name with `{layer}` and `{expert}`, and its shape in names of the family's sizes.

    A tensor with a dim of size 0 (biases that a config switches off) is not in the model, nor is its row. Its last
    `joined` dims are one dim of the tensor in the file. `parts`: its rows are groups of these parts (see `Fused`), in
    names of sizes. `linear`: the weight of a linear of attention, of an MLP or of
    an expert, (out, in): what checkpoints in fp8 have in fp8. Embedding, norms, head, biases, router, gates are not.
    """

    name: str
    dims: tuple[str, ...]
    joined: int = 1
    linear: bool = False
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a family table: the Hugging Face tensors, and the parameter that each side fuses them into.

    `trainer` lists every name that Megatron's specs (local, Transformer Engine) use for it. A row without a trainer
    name, or without an engine name, is of the other side only, where the two fuse other tensors. Experts of kind
    `expert` are one parameter each on the trainer; `engine_stacked`: the engine stacks them on a leading dim.
    `tied_to` replaces the sources in a model with tied embeddings. `engine_spare` (rows outside layers): every pipeline
    stage of the engine has the parameter, also those that never read it. `fp32`: who keeps it in fp32 whatever the
    model's dtype is.
    """

    kind: Kind
    layers: Layers
    sources: tuple[Source, ...]
    trainer: tuple[str, ...]
    trainer_rule: str
    engine: str
    engine_rule: str
    engine_stacked: bool = False
    tied_to: Source | None = None
    engine_spare: bool = False
    fp32: tuple[Holder, ...] = ()
