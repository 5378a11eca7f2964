"""A slow reference for layouts: tagged Hugging Face weights, cut by hand into what Megatron and vLLM would hold.

Nothing here uses `layout/`, `families/` or `plan/` to decide what lies where: every array is sliced from full tensors.
Numbers are unique integers, so that a conversion is a pure re-arrangement and any swap shows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from megastream.families import Family, ModelShape, family_of, load_shape
from tests.helpers.reference_blocks import EXPERT_COUNTS, Arrays, EngineRank, num_experts, part
from tests.helpers.reference_families import REFERENCES, TINY, Reference, config

__all__ = [
    "Model",
    "Placement",
    "any_placement",
    "awkward",
    "config",
    "megatron_rank",
    "qwen2_config",
    "split_layers",
    "tiny",
    "vllm_experts",
    "vllm_rank",
]


Placement = str | Sequence[Sequence[int]]
"""linear, round_robin, or the expert in every slot of all engine ranks, for each layer of the model."""


def qwen2_config(**changes: Any) -> dict[str, Any]:
    """The same sizes as a Qwen2-MoE: biases, no norms of heads, a shared expert of another width with its gate."""
    return REFERENCES["qwen2_moe"].config(**changes)


@dataclass
class Model:
    """A config, its shape, and tagged full tensors under Hugging Face names."""

    raw: dict[str, Any]
    tensors: Arrays = field(init=False)

    def __post_init__(self) -> None:
        self.shape: ModelShape = load_shape(self.raw)
        self.family: Family = family_of(self.shape)
        self.reference: Reference = REFERENCES[self.raw["model_type"]]
        self.tensors = {}
        self._layers: list[Arrays] = []
        self._next = 1
        c = self.raw
        self._add("model.embed_tokens.weight", c["vocab_size"], c["hidden_size"])
        for layer in range(c["num_hidden_layers"]):
            self._layers.append({})
            for block in self.reference.blocks(c, layer):
                for name, dims in block.tensors(c).items():
                    self._layers[-1][name] = self._add(f"model.layers.{layer}.{name}", *dims)
        self._add("model.norm.weight", c["hidden_size"])
        if not c["tie_word_embeddings"]:
            self._add("lm_head.weight", c["vocab_size"], c["hidden_size"])
        assert self._next < 1 << 24, "tags must be exact in float32"

    def _add(self, name: str, *dims: int) -> np.ndarray:
        size = int(np.prod(dims))
        array = np.arange(self._next, self._next + size, dtype=np.float32).reshape(dims)
        self.tensors[name] = array
        self._next += size
        return array

    @property
    def num_experts(self) -> int:
        return num_experts(self.raw)

    @property
    def head(self) -> np.ndarray:
        return self.tensors["model.embed_tokens.weight" if self.raw["tie_word_embeddings"] else "lm_head.weight"]

    def layer(self, layer: int) -> Arrays:
        """The tensors of a layer, by their names inside it."""
        return self._layers[layer]


@cache
def awkward(family: str) -> Model:
    """7 layers, 12 experts, vocabulary 101, 2 key/value heads, head_dim unlike hidden / heads."""
    return Model(REFERENCES[family].config())


@cache
def tiny(family: str, tied: bool, twelve: bool = False) -> Model:
    """3 layers, 4 experts, vocabulary 11; or 12 experts and vocabulary 101. `tied`: if the family can be."""
    reference = REFERENCES[family]
    changes = {**TINY, **reference.small, "tie_word_embeddings": tied and reference.ties}
    if twelve:
        experts = {key: reference.base[key] for key in EXPERT_COUNTS if key in reference.base}
        changes |= {**experts, "vocab_size": reference.base["vocab_size"]}
    return Model(reference.config(**changes))


def pad_rows(array: np.ndarray, multiple: int) -> np.ndarray:
    """NaN rows up to a multiple: padding must never travel."""
    missing = -len(array) % multiple
    return np.concatenate([array, np.full((missing, array.shape[1]), np.nan, np.float32)])


def megatron_rank(model: Model, at: dict[str, int], layers: list[int], te: bool, pad: int, swap: bool) -> Arrays:
    """Every parameter of one Megatron rank, by canonical name, in registration order. `swap` plants up before gate."""
    hf, tp, at = model.tensors, at["tp_size"], {**at, "swap": int(swap)}
    params: Arrays = {}
    if at["pp"] == 0:
        params["embedding.word_embeddings.weight"] = part(pad_rows(hf["model.embed_tokens.weight"], pad), at["tp"], tp)
    for layer in layers:
        for block in model.reference.blocks(model.raw, layer):
            held = block.megatron(model.layer(layer), model.raw, at, te)
            params |= {f"decoder.layers.{layer}.{name}": array for name, array in held.items()}
    if at["pp"] == at["pp_size"] - 1:
        params["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not (model.raw["tie_word_embeddings"] and at["pp"] == 0):
            params["output_layer.weight"] = part(pad_rows(model.head, pad), at["tp"], tp)
    return params


def vllm_rank(
    model: Model, at: dict[str, int], ep: bool, stages: list[list[int]], placement: Placement = "linear"
) -> tuple[Arrays, list[str]]:
    """(parameters of one vLLM rank in loader layout, names of those that no forward reads).

    Experts are placed, or cut, over tensor and data parallel ranks together (`FusedMoEParallelConfig`), tensor fastest.
    """
    hf, c, reference = model.tensors, model.raw, model.reference
    tp, tp_size, stage = at["tp"], at["tp_size"], at["pp"]
    index, count = at["dp"] * tp_size + tp, at["dp_size"] * tp_size
    first, last = stage == 0, stage == len(stages) - 1
    multiple = int(np.lcm(64, tp_size))
    params: Arrays = {}
    embed, norm, head = reference.ends
    if first or "embed" in reference.spares:
        params[embed] = part(pad_rows(hf["model.embed_tokens.weight"], multiple), tp, tp_size)
    if last or "norm" in reference.spares:
        params[norm] = hf["model.norm.weight"]
    if (last or "head" in reference.spares) and not (c["tie_word_embeddings"] and first and last):
        params[head] = part(pad_rows(model.head, multiple), tp, tp_size)
    for layer in stages[stage]:
        experts = vllm_experts(model, layer, index, count, placement) if ep else list(range(model.num_experts))
        rank = EngineRank(tp, tp_size, experts, (0, 1) if ep else (index, count))
        for block in reference.blocks(c, layer):
            held = block.vllm(model.layer(layer), c, rank)
            params |= {f"model.layers.{layer}.{name}": array for name, array in held.items()}
    unread = ([] if first else [embed]) + ([] if last else [norm, head])
    return params, [name for name in unread if name in params]


def vllm_experts(model: Model, layer: int, rank: int, size: int, placement: Placement) -> list[int]:
    """The expert in each slot of a rank, counted one by one. Linear: remainder experts to the lowest ranks."""
    if not isinstance(placement, str):
        slots = placement[layer]
        return [expert for slot, expert in enumerate(slots) if slot // (len(slots) // size) == rank]
    if placement == "round_robin":
        return [expert for expert in range(model.num_experts) if expert % size == rank]
    counts = [0] * size
    for expert in range(model.num_experts):
        counts[expert % size] += 1
    start = sum(counts[:rank])
    return list(range(start, start + counts[rank]))


def any_placement(draw: random.Random, model: Model, ep: int) -> Placement:
    """In turns, or in slots in any order, with none to three more of them than there must be on each rank; at times the
    same in all layers."""
    if draw.random() < 0.3:
        return "round_robin"
    num, num_layers = model.num_experts, model.raw["num_hidden_layers"]
    num_slots = ep * (-(-num // ep) + draw.randint(0, 3))
    rows = [[*range(num), *draw.choices(range(num), k=num_slots - num)] for _ in range(num_layers)]
    for row in rows:
        draw.shuffle(row)
    return rows[:1] * num_layers if draw.random() < 0.3 else rows


def split_layers(num_layers: int, sizes: tuple[int, ...]) -> list[list[int]]:
    """Consecutive layers per stage."""
    layers = iter(range(num_layers))
    split = [[next(layers) for _ in range(size)] for size in sizes]
    assert next(layers, None) is None
    return split
