"""Trainers' parameters as mbridge has them, a bridge between Hugging Face and Megatron that others wrote.

It knows the names of Transformer Engine's specs with grouped experts. Its maps need a config.json and tensors, neither
a model nor a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from megastream.families import FAMILIES
from megastream.layout.mesh import parse_trainer_mesh, trainer_coords
from megastream.layout.shard import BufferSpec
from megastream.layout.trainer import TrainerParam, trainer_rank_layout
from tests.helpers.layout_reference import Arrays, Model, awkward, megatron_rank

pytestmark = pytest.mark.full

NO_BRIDGE = ("deepseek_v2", "gpt_oss", "qwen3_next")
"""Families that this release of mbridge does not have."""
PAD = 8
"""Rows of the vocabulary on a rank are a multiple of this."""


def bridge_of(model: Model, tp: int) -> Any:
    """A bridge without a model: what builds one asks for Transformer Engine, the maps do not."""
    import mbridge  # noqa: F401  (fills the registry)
    from mbridge.core.bridge import _MODEL_REGISTRY

    raw = model.raw
    bridge = object.__new__(_MODEL_REGISTRY[raw["model_type"]])
    bridge.hf_config = SimpleNamespace(**raw)
    bridge.config = SimpleNamespace(num_layers=raw["num_hidden_layers"], mtp_num_layers=None, gated_linear_unit=True)
    bridge.dtype = None
    bridge.vocab_size, bridge.make_vocab_size_divisible_by = raw["vocab_size"], PAD * tp
    bridge.padded_vocab_size = -(-raw["vocab_size"] // (PAD * tp)) * PAD * tp
    return bridge


def rank_of_mbridge(model: Model, bridge: Any, held: Arrays, at: dict[str, int]) -> Arrays:
    """What mbridge loads into a rank's parameters. Of `held`, which were cut by hand, it is told names and shapes."""
    parts: Arrays = {}
    for name, array in held.items():
        axis = "etp" if ".mlp.experts.linear_fc" in name else "tp"
        sources = bridge._weight_name_mapping_mcore_to_hf(name)
        assert sources == [spec.name for spec in model.family.trainer_entry(name, model.shape).tensors], name
        whole = bridge._weight_to_mcore_format(name, [torch.from_numpy(model.tensors[source]) for source in sources])
        cut = bridge._weight_split_across_tp(name, whole, torch.empty(array.shape), at[f"{axis}_size"])
        parts[name] = cut[at[axis]].contiguous().numpy()
    return parts


def differing(model: Model, layout: str, edit: Callable[[Arrays], object] = lambda parts: None) -> list[str]:
    """Tensors that do not lie in mbridge's parameters where our layouts say; all elements are looked at."""
    mesh, layers = parse_trainer_mesh(layout), list(range(model.raw["num_hidden_layers"]))
    bridge, found = bridge_of(model, mesh.tp), set[str]()
    seen = {name: np.zeros(array.shape, int) for name, array in model.tensors.items()}
    for rank in range(mesh.world_size):
        at = trainer_coords(mesh, rank)
        parts = rank_of_mbridge(model, bridge, megatron_rank(model, at, layers, True, PAD * mesh.tp, False), at)
        edit(parts)
        ours = trainer_rank_layout(
            model.family,
            model.shape,
            rank=rank,
            world_size=mesh.world_size,
            coords=at,
            params=[TrainerParam(name, part.shape, name, 0) for name, part in parts.items()],
            buffers=[BufferSpec(name, part.size, "float32") for name, part in parts.items()],
        )
        for shard in ours.shards:
            strides = tuple(4 * step for step in shard.strides)
            place = tuple(map(slice, shard.box.lo, shard.box.hi))
            region = as_strided(parts[shard.buffer].reshape(-1)[shard.offset :], shard.box.shape, strides)
            found |= set() if np.array_equal(region, model.tensors[shard.tensor][place]) else {shard.tensor}
            seen[shard.tensor][place] += 1
    assert all(count.min() >= 1 for count in seen.values())
    return sorted(found)


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2 etp1 ep2", "ep3 dp3"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NO_BRIDGE])
def test_names_shapes_and_cuts_are_those_of_mbridge(family: str, layout: str) -> None:
    parted = awkward(family).shape.num_experts > 0
    assert differing(awkward(family), layout if parted else layout.split()[0].replace("ep3", "dp3")) == []


def test_what_lies_elsewhere_is_found() -> None:
    """Rows of gate and up exchanged in one expert."""
    name = "decoder.layers.3.mlp.experts.linear_fc1.weight7"

    def swap(parts: Arrays) -> None:
        parts[name] = np.concatenate(np.split(parts[name], 2)[::-1])

    expert = "model.layers.3.mlp.experts.7."
    assert differing(awkward("qwen3_moe"), "tp2", swap) == [f"{expert}gate_proj.weight", f"{expert}up_proj.weight"]


def test_families_without_a_bridge_are_those_that_we_know() -> None:
    from mbridge.core.bridge import _MODEL_REGISTRY

    assert tuple(name for name in FAMILIES if name not in _MODEL_REGISTRY) == NO_BRIDGE
