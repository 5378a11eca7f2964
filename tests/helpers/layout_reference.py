"""A slow reference for layouts: tagged Hugging Face weights, cut by hand into what Megatron and vLLM would hold.

Nothing here uses `layout/`, `families/` or `plan/` to decide what lies where: every array is sliced from full tensors.
Numbers are unique integers, so that a conversion is a pure re-arrangement and any swap shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megastream.families import Family, ModelShape, family_of, load_shape

Arrays = dict[str, np.ndarray]


def config(**changes: Any) -> dict[str, Any]:
    """All numbers distinct, head_dim not hidden / heads, layers prime, 12 experts (10 sorts before 2 as text)."""
    return {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 7,
        "hidden_size": 48,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "intermediate_size": 40,
        "vocab_size": 101,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | changes


def qwen2_config(**changes: Any) -> dict[str, Any]:
    """The same sizes as a Qwen2-MoE: biases, no norms of heads, a shared expert of another width with its gate."""
    qwen2 = {"model_type": "qwen2_moe", "head_dim": 6, "shared_expert_intermediate_size": 24}
    return config(**{**qwen2, **changes})


@dataclass
class Model:
    """A config, its shape, and tagged full tensors under Hugging Face names."""

    raw: dict[str, Any]
    tensors: Arrays = field(init=False)

    def __post_init__(self) -> None:
        self.shape: ModelShape = load_shape(self.raw)
        self.family: Family = family_of(self.shape)
        self.tensors = {}
        self._next = 1
        c = self.raw
        hidden, q, kv = (
            c["hidden_size"],
            c["num_attention_heads"] * c["head_dim"],
            c["num_key_value_heads"] * c["head_dim"],
        )
        self._add("model.embed_tokens.weight", c["vocab_size"], hidden)
        for layer in range(c["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            for name, *dims in (
                ("input_layernorm", hidden),
                ("post_attention_layernorm", hidden),
                ("self_attn.q_proj", q, hidden),
                ("self_attn.k_proj", kv, hidden),
                ("self_attn.v_proj", kv, hidden),
                ("self_attn.o_proj", hidden, q),
                *(() if self.qwen2 else (("self_attn.q_norm", c["head_dim"]), ("self_attn.k_norm", c["head_dim"]))),
            ):
                self._add(f"{p}{name}.weight", *dims)
            for name, size in (("q", q), ("k", kv), ("v", kv)) if self.qwen2 else ():
                self._add(f"{p}self_attn.{name}_proj.bias", size)
            if layer in c.get("mlp_only_layers", ()):
                self._mlp(p + "mlp.", c["intermediate_size"], hidden)
                continue
            self._add(p + "mlp.gate.weight", c["num_experts"], hidden)
            if self.qwen2:
                self._add(p + "mlp.shared_expert_gate.weight", 1, hidden)
                self._mlp(p + "mlp.shared_expert.", c["shared_expert_intermediate_size"], hidden)
            for expert in range(c["num_experts"]):
                self._mlp(f"{p}mlp.experts.{expert}.", c["moe_intermediate_size"], hidden)
        self._add("model.norm.weight", hidden)
        if not c["tie_word_embeddings"]:
            self._add("lm_head.weight", c["vocab_size"], hidden)
        assert self._next < 1 << 24, "tags must be exact in float32"

    @property
    def qwen2(self) -> bool:
        return bool(self.raw["model_type"] == "qwen2_moe")

    def _add(self, name: str, *dims: int) -> None:
        size = int(np.prod(dims))
        self.tensors[name] = np.arange(self._next, self._next + size, dtype=np.float32).reshape(dims)
        self._next += size

    def _mlp(self, prefix: str, ffn: int, hidden: int) -> None:
        self._add(prefix + "gate_proj.weight", ffn, hidden)
        self._add(prefix + "up_proj.weight", ffn, hidden)
        self._add(prefix + "down_proj.weight", hidden, ffn)

    @property
    def head(self) -> np.ndarray:
        return self.tensors["model.embed_tokens.weight" if self.raw["tie_word_embeddings"] else "lm_head.weight"]


def part(array: np.ndarray, index: int, count: int, dim: int = 0) -> np.ndarray:
    """The index-th of `count` equal parts along a dim."""
    return np.split(array, count, axis=dim)[index]


def pad_rows(array: np.ndarray, multiple: int) -> np.ndarray:
    """NaN rows up to a multiple: padding must never travel."""
    missing = -len(array) % multiple
    return np.concatenate([array, np.full((missing, array.shape[1]), np.nan, np.float32)])


def megatron_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray, num_groups: int) -> np.ndarray:
    """Megatron's fused rows: per key/value group its query heads, its k, its v."""
    rows = []
    for group in range(num_groups):
        rows += [part(q, group, num_groups), part(k, group, num_groups), part(v, group, num_groups)]
    return np.concatenate(rows)


def megatron_rank(model: Model, at: dict[str, int], layers: list[int], te: bool, pad: int, swap: bool) -> Arrays:
    """Every parameter of one Megatron rank, by canonical name, in registration order. `swap` plants up before gate."""
    hf, tp, etp = model.tensors, at["tp_size"], at["etp_size"]
    params: Arrays = {}
    if at["pp"] == 0:
        params["embedding.word_embeddings.weight"] = part(pad_rows(hf["model.embed_tokens.weight"], pad), at["tp"], tp)
    for layer in layers:
        source, to = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (hf[f"{source}self_attn.{name}_proj.weight"] for name in "qkv")
        fused = megatron_qkv(q, k, v, model.raw["num_key_value_heads"])
        dense = layer in model.raw.get("mlp_only_layers", ())
        norm1 = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
        norm2 = "mlp.linear_fc1.layer_norm_weight" if te and dense else "pre_mlp_layernorm.weight"
        params[to + norm1] = hf[source + "input_layernorm.weight"]
        params[to + "self_attention.linear_proj.weight"] = part(hf[source + "self_attn.o_proj.weight"], at["tp"], tp, 1)
        params[to + "self_attention.linear_qkv.weight"] = part(fused, at["tp"], tp)
        if model.qwen2:
            biases = (hf[f"{source}self_attn.{name}_proj.bias"] for name in "qkv")
            fused = megatron_qkv(*biases, model.raw["num_key_value_heads"])
            params[to + "self_attention.linear_qkv.bias"] = part(fused, at["tp"], tp)
        else:
            params[to + "self_attention.q_layernorm.weight"] = hf[source + "self_attn.q_norm.weight"]
            params[to + "self_attention.k_layernorm.weight"] = hf[source + "self_attn.k_norm.weight"]
        params[to + norm2] = hf[source + "post_attention_layernorm.weight"]
        if dense:
            fc1, fc2 = megatron_mlp(hf, source + "mlp.", at["tp"], tp, swap)
            params[to + "mlp.linear_fc1.weight"], params[to + "mlp.linear_fc2.weight"] = fc1, fc2
            continue
        params[to + "mlp.router.weight"] = hf[source + "mlp.gate.weight"]
        num_local = model.raw["num_experts"] // at["ep_size"]
        for expert in range(at["ep"] * num_local, (at["ep"] + 1) * num_local):
            fc1, fc2 = megatron_mlp(hf, f"{source}mlp.experts.{expert}.", at["etp"], etp, swap)
            for linear, array in (("linear_fc1", fc1), ("linear_fc2", fc2)):
                local = f"local_experts.{expert}.{linear}.weight"
                params[f"{to}mlp.experts." + (f"{linear}.weight{expert}" if te else local)] = array
        if model.qwen2:
            fc1, fc2 = megatron_mlp(hf, source + "mlp.shared_expert.", at["tp"], tp, swap)
            shared = to + "mlp.shared_experts."
            params[shared + "linear_fc1.weight"], params[shared + "linear_fc2.weight"] = fc1, fc2
            params[shared + "gate_weight"] = hf[source + "mlp.shared_expert_gate.weight"]
    if at["pp"] == at["pp_size"] - 1:
        params["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not (model.raw["tie_word_embeddings"] and at["pp"] == 0):
            params["output_layer.weight"] = part(pad_rows(model.head, pad), at["tp"], tp)
    return params


def megatron_mlp(hf: Arrays, prefix: str, index: int, count: int, swap: bool) -> tuple[np.ndarray, np.ndarray]:
    """(fc1, fc2) of one rank: fc1 is [gate_r; up_r], fc2 a column cut."""
    halves = [part(hf[f"{prefix}{name}_proj.weight"], index, count) for name in ("gate", "up")]
    return np.concatenate(halves[::-1] if swap else halves), part(hf[prefix + "down_proj.weight"], index, count, 1)


def vllm_rank(
    model: Model, tp: int, tp_size: int, ep: bool, stage: int, stages: list[list[int]]
) -> tuple[Arrays, list[str]]:
    """(parameters of one vLLM rank in loader layout, names of those that no forward reads)."""
    hf, c = model.tensors, model.raw
    first, last = stage == 0, stage == len(stages) - 1
    multiple = int(np.lcm(64, tp_size))
    params: Arrays = {
        "model.embed_tokens.weight": part(pad_rows(hf["model.embed_tokens.weight"], multiple), tp, tp_size),
        "model.norm.weight": hf["model.norm.weight"],
    }
    if not (c["tie_word_embeddings"] and first and last):
        params["lm_head.weight"] = part(pad_rows(model.head, multiple), tp, tp_size)
    heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    q_heads = range(tp * heads // tp_size, (tp + 1) * heads // tp_size)
    kv = range(tp * kv_heads // tp_size, max((tp + 1) * kv_heads // tp_size, tp * kv_heads // tp_size + 1))
    experts = vllm_experts(c["num_experts"], tp, tp_size) if ep else list(range(c["num_experts"]))
    cut = (0, 1) if ep else (tp, tp_size)
    for layer in stages[stage]:
        p = f"model.layers.{layer}."
        for what in ("weight", "bias") if model.qwen2 else ("weight",):
            pieces = [hf[f"{p}self_attn.q_proj.{what}"][h * dim : (h + 1) * dim] for h in q_heads]
            for name in "kv":
                pieces += [hf[f"{p}self_attn.{name}_proj.{what}"][h * dim : (h + 1) * dim] for h in kv]
            params[f"{p}self_attn.qkv_proj.{what}"] = np.concatenate(pieces)
        params[p + "self_attn.o_proj.weight"] = part(hf[p + "self_attn.o_proj.weight"], tp, tp_size, 1)
        norms = () if model.qwen2 else ("self_attn.q_norm", "self_attn.k_norm")
        for name in ("input_layernorm", "post_attention_layernorm", *norms):
            params[f"{p}{name}.weight"] = hf[f"{p}{name}.weight"]
        if layer in c.get("mlp_only_layers", ()):
            halves = [part(hf[f"{p}mlp.{name}_proj.weight"], tp, tp_size) for name in ("gate", "up")]
            params[p + "mlp.gate_up_proj.weight"] = np.concatenate(halves)
            params[p + "mlp.down_proj.weight"] = part(hf[p + "mlp.down_proj.weight"], tp, tp_size, 1)
            continue
        params[p + "mlp.gate.weight"] = hf[p + "mlp.gate.weight"]
        if model.qwen2:
            shared = p + "mlp.shared_expert."
            halves = [part(hf[f"{shared}{name}_proj.weight"], tp, tp_size) for name in ("gate", "up")]
            params[shared + "gate_up_proj.weight"] = np.concatenate(halves)
            params[shared + "down_proj.weight"] = part(hf[shared + "down_proj.weight"], tp, tp_size, 1)
            params[p + "mlp.shared_expert_gate.weight"] = hf[p + "mlp.shared_expert_gate.weight"]
        w13, w2 = [], []
        for expert in experts:
            mlp = f"{p}mlp.experts.{expert}."
            w13.append(np.concatenate([part(hf[f"{mlp}{name}_proj.weight"], *cut) for name in ("gate", "up")]))
            w2.append(part(hf[mlp + "down_proj.weight"], *cut, dim=1))
        params[p + "mlp.experts.routed_experts.w13_weight"] = np.stack(w13)
        params[p + "mlp.experts.routed_experts.w2_weight"] = np.stack(w2)
    unused = [] if first else ["model.embed_tokens.weight"]
    unused += [] if last else [name for name in ("model.norm.weight", "lm_head.weight") if name in params]
    return params, unused


def vllm_experts(num_experts: int, rank: int, size: int) -> list[int]:
    """Linear placement, remainder experts to the lowest ranks, counted one by one."""
    counts = [0] * size
    for expert in range(num_experts):
        counts[expert % size] += 1
    start = sum(counts[:rank])
    return list(range(start, start + counts[rank]))


def split_layers(num_layers: int, sizes: tuple[int, ...]) -> list[list[int]]:
    """Consecutive layers per stage."""
    layers = iter(range(num_layers))
    split = [[next(layers) for _ in range(size)] for size in sizes]
    assert next(layers, None) is None
    return split
