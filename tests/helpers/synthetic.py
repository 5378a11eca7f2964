"""A model that exists only as layouts and tagged tensors: what trainer ranks hold, what engine ranks should hold.

The expected bytes come from the full tensors and each side's own shards, never from a plan.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import prod

import torch

from megastream.families import family_of, load_shape
from megastream.layout.mesh import parse_engine_mesh, parse_trainer_mesh
from megastream.layout.shard import RankLayout, Shard
from megastream.layout.synthetic import engine_layouts, trainer_layouts

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "vocab_size": 101,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
SHAPE = load_shape(CONFIG)
FAMILY = family_of(SHAPE)
SPECS = {spec.name: spec for spec in FAMILY.tensors(SHAPE)}


def trainer_side(mesh: str) -> tuple[RankLayout, ...]:
    return trainer_layouts(FAMILY, SHAPE, parse_trainer_mesh(mesh), bucket_elements=4000)


def engine_side(mesh: str) -> tuple[RankLayout, ...]:
    return engine_layouts(FAMILY, SHAPE, parse_engine_mesh(mesh))


def full_tensor(name: str, version: int) -> torch.Tensor:
    """Every element of every version differs (as bf16 allows), reproducibly in every process."""
    shape = SPECS[name].shape
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + 7919 * version)
    return torch.randn(prod(shape), generator=generator).to(torch.bfloat16).view(shape)


def fill(layout: RankLayout, buffers: dict[str, torch.Tensor], version: int) -> None:
    """Writes a version into the flat buffers of one rank."""
    for shard in layout.shards:
        region(buffers[shard.buffer], shard).copy_(_cut(shard, version))


def differing(layout: RankLayout, buffers: dict[str, torch.Tensor], version: int | Callable[[str], int]) -> list[str]:
    """Tensors of an engine rank that are not bit for bit what `version`, or that of each tensor, should be there."""
    version_of = version if callable(version) else lambda tensor: version
    return [
        f"{shard.buffer} ({shard.tensor})"
        for shard in layout.shards
        if not torch.equal(region(buffers[shard.buffer], shard), _cut(shard, version_of(shard.tensor)))
    ]


def empty_buffers(layout: RankLayout) -> dict[str, torch.Tensor]:
    return {spec.name: torch.zeros(spec.num_elements, dtype=getattr(torch, spec.dtype)) for spec in layout.buffers}


def region(flat: torch.Tensor, shard: Shard) -> torch.Tensor:
    return flat.as_strided(shard.box.shape, shard.strides, shard.offset)


def _cut(shard: Shard, version: int) -> torch.Tensor:
    slices = tuple(slice(lo, hi) for lo, hi in zip(shard.box.lo, shard.box.hi, strict=True))
    return full_tensor(shard.tensor, version)[slices]
