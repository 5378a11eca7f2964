"""What the engine must hold, worked out a second time: from the trainer's raw parameters, without layout or plan.

The rules of this file are written straight from what Megatron and vLLM do with their own tensors, slowly and one
tensor at a time, so that a mistake in the reshard plan has nothing here to agree with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from megastream.rl.config import ModelConfig

ENGINE_VOCAB_MULTIPLE = 64
"""vLLM pads embedding and head to a multiple of this many rows, with zeros."""

Cut = Literal["rows", "columns", "gate_up", "whole"]

_TENSOR_PARALLEL: tuple[tuple[str, Cut], ...] = (
    (r"embedding\.word_embeddings\.weight|output_layer\.weight", "rows"),
    (r".*self_attention\.linear_qkv\.(weight|bias)", "rows"),
    (r".*\.eh_proj\.weight", "rows"),
    (r".*self_attention\.linear_proj\.weight", "columns"),
    (r".*mlp\.(experts\..*\.|shared_experts\.|)linear_fc1\.weight", "gate_up"),
    (r".*mlp\.(experts\..*\.|shared_experts\.|)linear_fc2\.weight", "columns"),
    (r".*", "whole"),
)
"""How Megatron cuts a parameter over tensor parallel ranks; the first match counts."""

_RENAMED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    **{f"{name}.weight": f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj")},
    "final_layernorm.weight": "shared_head.norm.weight",
}


class OracleError(ValueError):
    """The trainer's ranks do not add up to one model. Names the parameter and the ranks."""


@dataclass(frozen=True, slots=True)
class Dump:
    """The raw parameters of one trainer rank: global layer and expert indices in the names, local shapes."""

    rank: int
    tp: int
    etp: int
    params: dict[str, torch.Tensor]


def read_dump(path: Path) -> Dump:
    """A file of MegatronAdapter.save_raw: safetensors, with `rank` and the mesh coordinates in the metadata."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    return Dump(int(metadata["rank"]), int(metadata["tp"]), int(metadata["etp"]), load_file(path))


def gather(dumps: Sequence[Dump]) -> dict[str, torch.Tensor]:
    """Full Megatron parameters by global name. Replicas must agree bit for bit."""
    parts: dict[str, dict[int, tuple[int, torch.Tensor]]] = {}
    for dump in dumps:
        for name, value in dump.params.items():
            index = dump.etp if ".experts." in name else dump.tp
            held = parts.setdefault(name, {})
            if index in held and not torch.equal(held[index][1].view(torch.uint8), value.view(torch.uint8)):
                raise OracleError(f"trainer ranks {held[index][0]} and {dump.rank} hold different bytes of {name}")
            held.setdefault(index, (dump.rank, value))
    return {name: _join(name, [held[i][1] for i in sorted(held)]) for name, held in parts.items()}


def _join(name: str, shards: list[torch.Tensor]) -> torch.Tensor:
    cut = next(cut for pattern, cut in _TENSOR_PARALLEL if re.fullmatch(pattern, name))
    if len(shards) == 1 or cut == "whole":
        return shards[0]
    if cut == "gate_up":
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(shards, dim=0 if cut == "rows" else 1)


def to_hf(params: Mapping[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """Full tensors under their Hugging Face names."""
    out: dict[str, torch.Tensor] = {}
    for name, value in params.items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        if match is None:
            out[_outside_layers(name)] = value
        else:
            out |= _layer_tensor(f"model.layers.{match[1]}.", match[2], value, model)
    return out


def _outside_layers(name: str) -> str:
    known = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if name not in known:
        raise OracleError(f"no rule for the trainer parameter {name}")
    return known[name]


def _layer_tensor(prefix: str, rest: str, value: torch.Tensor, model: ModelConfig) -> dict[str, torch.Tensor]:
    if rest in _RENAMED:
        return {prefix + _RENAMED[rest]: value}
    if match := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", rest):
        # Megatron keeps, for each kv head, the rows of its query heads, then its k, then its v.
        per_group = model.heads // model.kv_heads
        groups = value.view(model.kv_heads, per_group + 2, model.head_dim, *value.shape[1:])
        parts = {"q": groups[:, :per_group], "k": groups[:, per_group], "v": groups[:, per_group + 1]}
        return {prefix + f"self_attn.{n}_proj.{match[1]}": t.reshape(-1, *value.shape[1:]) for n, t in parts.items()}
    match = re.fullmatch(r"mlp\.(experts\.local_experts\.\d+\.|shared_experts\.|)linear_fc([12])\.weight", rest)
    if match is None:
        raise OracleError(f"no rule for the trainer parameter {prefix}{rest}")
    inner = match[1].replace("local_experts.", "").replace("shared_experts", "shared_expert")
    if match[2] == "2":
        return {f"{prefix}mlp.{inner}down_proj.weight": value}
    gate, up = value.chunk(2, dim=0)
    return {f"{prefix}mlp.{inner}gate_proj.weight": gate, f"{prefix}mlp.{inner}up_proj.weight": up}


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The engine's mesh. Ranks count tensor parallel first; with `ep`, experts are cut over it instead of in width."""

    tp: int
    pp: int
    ep: bool

    @staticmethod
    def of(layout: str) -> EngineShape:
        return {"pp2": EngineShape(1, 2, False), "tp2ep": EngineShape(2, 1, True), "single": EngineShape(1, 1, False)}[
            layout
        ]

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


def expected_live(
    hf: Mapping[str, torch.Tensor], model: ModelConfig, engine: EngineShape, rank: int
) -> dict[str, torch.Tensor]:
    """Everything that engine rank `rank` computes with, under vLLM's parameter names, in its loader's layout."""
    stage, t = divmod(rank, engine.tp)
    per_stage = model.layers // engine.pp
    out: dict[str, torch.Tensor] = {}
    if stage == 0:
        out["model.embed_tokens.weight"] = _rows(_pad_vocab(hf["model.embed_tokens.weight"], engine), engine, t)
    if stage == engine.pp - 1:
        out["model.norm.weight"] = hf["model.norm.weight"]
        out["lm_head.weight"] = _rows(_pad_vocab(hf["lm_head.weight"], engine), engine, t)
    for layer in range(stage * per_stage, (stage + 1) * per_stage):
        out |= _expected_layer(hf, f"model.layers.{layer}.", model, engine, t)
    return out


def _expected_layer(
    hf: Mapping[str, torch.Tensor], prefix: str, model: ModelConfig, engine: EngineShape, t: int
) -> dict[str, torch.Tensor]:
    attention = prefix + "self_attn."
    out = {prefix + n: hf[prefix + n] for n in ("input_layernorm.weight", "post_attention_layernorm.weight")}
    out |= {attention + n: hf[attention + n] for n in ("q_norm.weight", "k_norm.weight")}
    out[prefix + "mlp.gate.weight"] = hf[prefix + "mlp.gate.weight"]
    qkv = [_rows(hf[attention + f"{n}_proj.weight"], engine, t) for n in "qkv"]
    out[attention + "qkv_proj.weight"] = torch.cat(qkv)
    out[attention + "o_proj.weight"] = hf[attention + "o_proj.weight"].chunk(engine.tp, dim=1)[t]
    w13, w2 = [], []
    for expert in _local_experts(model, engine, t):
        name = prefix + f"mlp.experts.{expert}."
        gate, up, down = (hf[name + f"{n}_proj.weight"] for n in ("gate", "up", "down"))
        if not engine.ep:
            gate, up, down = _rows(gate, engine, t), _rows(up, engine, t), down.chunk(engine.tp, dim=1)[t]
        w13.append(torch.cat([gate, up]))
        w2.append(down)
    out[prefix + "mlp.experts.routed_experts.w13_weight"] = torch.stack(w13)
    out[prefix + "mlp.experts.routed_experts.w2_weight"] = torch.stack(w2)
    return out


def _local_experts(model: ModelConfig, engine: EngineShape, t: int) -> range:
    if not engine.ep:
        return range(model.experts)
    each = model.experts // engine.tp
    return range(t * each, (t + 1) * each)


def _rows(value: torch.Tensor, engine: EngineShape, t: int) -> torch.Tensor:
    return value.chunk(engine.tp, dim=0)[t]


def _pad_vocab(value: torch.Tensor, engine: EngineShape) -> torch.Tensor:
    missing = -value.shape[0] % ENGINE_VOCAB_MULTIPLE
    return torch.cat([value, value.new_zeros(missing, value.shape[1])])


def digest(value: torch.Tensor) -> str:
    """xxh3-64 of a bf16 tensor's bytes, as hex.

    -0 counts as 0, and what lies below the smallest normal number as 0: packed kernels hold neither.
    """
    bits = value.contiguous().view(torch.int16)
    bits = bits.where((bits & 0x7F80) != 0, 0)
    return xxhash.xxh3_64_hexdigest(bits.view(torch.uint8).numpy().data)


def compare(expected: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    """Names whose digests differ, or that only one side has. Empty when the engine holds what it must."""
    return sorted(name for name in expected.keys() | live.keys() if expected.get(name) != live.get(name))
