"""What layouts need to know of a model family, as a protocol: `layout/` stands below `families/`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, TypeVar

import msgspec

from megastream.layout.placing import Fused
from megastream.layout.shard import TensorSpec

Kind = Literal["dense", "expert", "late", "embed", "norm", "head"]
Shape_contra = TypeVar("Shape_contra", contravariant=True)


class Entry(msgspec.Struct, frozen=True, gc=False):
    """What a parameter name stands for. `rule` is a key of RULES; expert entries are cut by the expert axis.

    `expert` is its global expert where the tensors hold all of them; `parts` as in `Fused`. `dtype` is the parameter's
    on that side, as far as a config.json tells; who describes live parameters knows better.
    """

    kind: Kind
    rule: str
    tensors: tuple[TensorSpec, ...]
    head_dim: int
    dtype: str
    expert: int = 0
    parts: tuple[tuple[int, ...], ...] = ()

    def fused(self, padded_rows: int = 0) -> Fused:
        """What a rule is told of the parameter; `padded_rows` as in `Fused`."""
        return Fused(self.tensors, self.head_dim, padded_rows, self.expert, self.parts)


class Names(Protocol[Shape_contra]):
    """A family's names. `Shape` is whatever the family needs to size its tensors; layouts only pass it on."""

    @property
    def name(self) -> str: ...

    def tensors(self, shape: Shape_contra) -> tuple[TensorSpec, ...]:
        """Every Hugging Face tensor of the model."""

    def num_experts(self, shape: Shape_contra) -> int:
        """Routed experts of a layer, over all ranks."""

    def trainer_entry(self, name: str, shape: Shape_contra) -> Entry:
        """Meaning of a canonical Megatron name. ValueError names a parameter without a rule."""

    def engine_entry(self, name: str, shape: Shape_contra, expert: int | None = None) -> Entry:
        """Meaning of a live engine name; for stacked experts, of the slot that holds global expert `expert`."""

    def engine_stacks_experts(self, name: str) -> bool:
        """True when the engine parameter holds one expert per index of its leading dim."""

    def trainer_names(self, shape: Shape_contra, layers: Sequence[int], experts: Sequence[int]) -> Iterator[str]:
        """Canonical Megatron names of a rank with these layers and experts, without embedding, norm and head."""

    def engine_names(self, shape: Shape_contra, layers: Sequence[int]) -> Iterator[str]:
        """Live engine names of a rank with these layers, without embedding, norm and head."""

    def outer_names(self, side: Literal["trainer", "engine"], shape: Shape_contra) -> dict[Kind, str]:
        """The names outside the layers, by kind: embed, norm, head."""

    def engine_spares(self) -> tuple[Kind, ...]:
        """Kinds outside the layers that the engine keeps on every pipeline stage, also where no step reads them."""
