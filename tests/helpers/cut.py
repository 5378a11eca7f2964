"""Cuts a checkpoint into one vLLM rank's live parameters, by what vLLM's loader does and without layout/ or plan/."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tests.helpers.tiny_moe import TinyMoe, Weights


def cut(
    weights: Weights, moe: TinyMoe, names: Iterable[str], *, tp: int, tp_size: int, expert_parallel: bool
) -> dict[str, torch.Tensor]:
    """The live parameters `names` in loader layout. With expert parallelism the experts are dealt in equal runs."""
    return {name: _one(weights, moe, name, tp, tp_size, expert_parallel).contiguous() for name in names}


def _one(weights: Weights, moe: TinyMoe, name: str, tp: int, tp_size: int, expert_parallel: bool) -> torch.Tensor:
    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp_size, 0)[tp]

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(tp_size, 1)[tp]

    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        full = weights[name]
        padding = -len(full) % (64 * tp_size // min(tp_size, 64))
        return rows(torch.cat([full, full.new_zeros(padding, full.shape[1])]))
    for fused, parts in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
        if f"{fused}_proj" in name:
            return torch.cat([rows(weights[name.replace(fused, part)]) for part in parts])
    if name.endswith(("o_proj.weight", "shared_expert.down_proj.weight")):
        return columns(weights[name])
    if not name.endswith(("w13_weight", "w2_weight")):
        return weights[name]
    prefix = name.split(".routed_experts.")[0]
    mine = list(range(moe.experts))
    if expert_parallel:
        count = moe.experts // tp_size
        mine = mine[tp * count : (tp + 1) * count]
        rows = columns = lambda tensor: tensor
    if name.endswith("w2_weight"):
        return torch.stack([columns(weights[f"{prefix}.{e}.down_proj.weight"]) for e in mine])
    return torch.stack(
        [torch.cat([rows(weights[f"{prefix}.{e}.{part}_proj.weight"]) for part in ("gate", "up")]) for e in mine]
    )
