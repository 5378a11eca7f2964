"""Routed experts of a Hugging Face checkpoint in a trainer's place: for whoever swaps experts without training them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

from megastream.families import family_of, load_shape
from megastream.families.family import Family
from megastream.families.types import ModelShape
from megastream.layout.box import Box
from megastream.layout.pack import row_major_strides
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec
from megastream.trainer.hf_files import HuggingFaceFiles

ExpertId = tuple[int, int]
"""(layer, global expert)."""


class CheckpointExperts:
    """What TrainerSync asks of a trainer, for one that has these experts and nothing else; all of it is on one rank.

    Each tensor is a bucket of its own. ValueError names what is wrong with the checkpoint, or an expert that its model
    does not have.
    """

    library = "a Hugging Face checkpoint"

    def __init__(self, folder: Path, experts: Sequence[ExpertId]) -> None:
        shape = shape_of(folder)
        self.family = family_of(shape)
        specs = expert_tensors(self.family, shape, experts)
        self._shards = tuple(
            Shard(spec.name, Box.full(spec.shape), 0, spec.name, 0, row_major_strides(spec.shape)) for spec in specs
        )
        with HuggingFaceFiles(folder, specs) as files:
            self.buffers = {shard.buffer: files.read(shard).contiguous().view(-1) for shard in self._shards}

    def describe(self) -> RankLayout:
        specs = [
            (shard.tensor, shard.box.shape, str(self.buffers[shard.tensor].dtype).removeprefix("torch."))
            for shard in self._shards
        ]
        return RankLayout(
            side="trainer",
            rank=0,
            world_size=1,
            coords={},
            tensors=tuple(TensorSpec(*spec) for spec in specs),
            buffers=tuple(BufferSpec(name, prod(shape), dtype) for name, shape, dtype in specs),
            shards=self._shards,
        )


def shape_of(folder: Path) -> ModelShape:
    """The shape of a checkpoint's model. ValueError when there is no config.json that can be read."""
    try:
        return load_shape(folder)
    except OSError as error:
        raise ValueError(f"{folder} is no Hugging Face checkpoint: config.json: {error.strerror}") from error


def expert_tensors(family: Family, shape: ModelShape, experts: Sequence[ExpertId]) -> list[TensorSpec]:
    """All tensors of these experts, in the model's order. ValueError names an expert that the model does not have."""
    found = _by_expert(family, shape)
    for layer, expert in experts:
        if (layer, expert) not in found:
            raise ValueError(_no_such_expert(family, shape, layer, expert, {each for each, _ in found}))
    wanted = set(experts)
    return [spec for expert, tensors in found.items() if expert in wanted for spec in tensors]


def _by_expert(family: Family, shape: ModelShape) -> dict[ExpertId, list[TensorSpec]]:
    """The tensors of every expert that has some of its own."""
    specs = family.tensors(shape)
    found: dict[ExpertId, list[TensorSpec]] = {}
    for spec, place in zip(specs, family.places(spec.name for spec in specs), strict=True):
        if place.kind == "expert" and place.layer is not None and place.expert is not None:
            found.setdefault((place.layer, place.expert), []).append(spec)
    return found


def _no_such_expert(family: Family, shape: ModelShape, layer: int, expert: int, layers: set[int]) -> str:
    if not shape.num_experts:
        return f"this {family.name} has no experts"
    if not layers:
        return f"a checkpoint of family {family.name} holds all experts of a layer in one tensor: none can be swapped"
    if not 0 <= layer < shape.num_layers:
        return f"layer {layer} is not in this {family.name}, whose layers are 0 to {shape.num_layers - 1}"
    if layer not in layers:
        return f"layer {layer} of this {family.name} has no experts; layers {min(layers)} to {max(layers)} have some"
    return f"expert {expert} is not in layer {layer}, whose experts are 0 to {shape.num_experts - 1}"
