"""Experts as Megatron's legacy GroupedMLP stores them (megatron-core <= 0.16): all those of a rank in two parameters.

`weight1` is said to be [hidden, experts x 2 ffn] and `weight2` [experts x ffn, hidden]. In memory they are one expert
behind the other, [experts, hidden, 2 ffn] and [experts, ffn, hidden]: what its `forward` views them as, gate before up.
So an expert is SequentialMLP's parameter, stored column by column. Read, and not written: what is written as
`torch_dist` such a model loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from megastream.convert.model import Model
from megastream.layout.box import Box
from megastream.layout.placing import window_shards
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec
from megastream.layout.trainer import place_trainer_param

_NAME = re.compile(r"(.+\.mlp\.experts\.)weight([12])")


def is_grouped(name: str) -> bool:
    """Whether a canonical name is that of such a parameter."""
    return _NAME.fullmatch(name) is not None


def with_grouped(
    layout: RankLayout, params: Iterable[TensorSpec], coords: Mapping[str, int], model: Model
) -> RankLayout:
    """The layout of the rank at `coords`, and in it these parameters, each a buffer of its own.

    ValueError names one of another shape, and experts that the model does not have.
    """
    tensors = {spec.name: spec for spec in layout.tensors}
    buffers, shards = list(layout.buffers), list(layout.shards)
    for param in params:
        buffers.append(BufferSpec(param.name, prod(param.shape), param.dtype))
        for tensor, shard in _shards(param, layout.rank, coords, model):
            tensors[tensor.name] = tensor
            shards.append(shard)
    return replace(layout, tensors=tuple(tensors.values()), buffers=tuple(buffers), shards=tuple(shards))


def _shards(
    param: TensorSpec, rank: int, coords: Mapping[str, int], model: Model
) -> Iterator[tuple[TensorSpec, Shard]]:
    match = _NAME.fullmatch(param.name)
    num = model.shape.num_experts // coords["ep_size"]
    if match is None or not num:
        raise ValueError(f"{param.name}: config.json says no experts")
    for number in range(num):
        name = f"{match[1]}local_experts.{coords['ep'] * num + number}.linear_fc{match[2]}.weight"
        placed = place_trainer_param(model.family.trainer_entry(name, model.shape), coords)
        rows, columns = placed.shape
        expected = (columns, num * rows) if match[2] == "1" else (num * columns, rows)
        if param.shape != expected:
            raise ValueError(
                f"{param.name} has shape {param.shape}; {num} experts of config.json have {expected} in GroupedMLP"
            )
        whole, base = Box.full(placed.shape), number * rows * columns
        yield from window_shards(placed, whole, (1, rows), rank=rank, buffer=param.name, base=base)
