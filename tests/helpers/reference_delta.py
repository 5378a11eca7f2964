"""Gated delta nets and gated attention (Qwen3-Next), cut by hand; the orders are those in which `transformers` (files),
vLLM and Megatron's `GatedDeltaNet` and `SelfAttention` take their projections apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.helpers.reference_blocks import Arrays, Attention, Config, Dims, EngineRank, part


@dataclass(frozen=True)
class DeltaNet:
    """Each key head, with the value heads that it serves, is a group of rows of the two input projections."""

    def tensors(self, c: Config) -> Dims:
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        heads = c["linear_num_value_heads"]
        values = heads * c["linear_value_head_dim"]
        dims: Dims = {
            "in_proj_qkvz.weight": (2 * keys + 2 * values, c["hidden_size"]),
            "in_proj_ba.weight": (2 * heads, c["hidden_size"]),
            "conv1d.weight": (2 * keys + values, 1, c["linear_conv_kernel_dim"]),
            "dt_bias": (heads,),
            "A_log": (heads,),
            "norm.weight": (c["linear_value_head_dim"],),
            "out_proj.weight": (c["hidden_size"], values),
        }
        return {f"linear_attn.{name}": shape for name, shape in dims.items()}

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        """q, k, v, z, b and a of this rank's groups, each of all groups together."""
        own, cut = _Own(w, c), (at["tp"], at["tp_size"])
        params = {"in_proj.weight": np.concatenate([part(rows, *cut) for rows in own.apart()])}
        params["out_norm.weight"] = w["linear_attn.norm.weight"]
        return {f"self_attention.{name}": array for name, array in {**params, **own.alike(*cut)}.items()}

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        own, cut = _Own(w, c), (at.tp, at.tp_size)
        inputs = ("in_proj_qkvz.weight", "in_proj_ba.weight")
        params = {name: part(w[f"linear_attn.{name}"], *cut) for name in inputs}
        params["norm.weight"] = w["linear_attn.norm.weight"]
        return {f"linear_attn.{name}": array for name, array in {**params, **own.alike(*cut)}.items()}


@dataclass(frozen=True)
class _Own:
    w: Arrays
    c: Config

    def apart(self) -> list[np.ndarray]:
        """All rows of q, of k, of v, of z, of b and of a, each in the order of heads."""
        groups, key = self.c["linear_num_key_heads"], self.c["linear_key_head_dim"]
        each = self.c["linear_num_value_heads"] // groups
        value = each * self.c["linear_value_head_dim"]
        found = []
        for name, ends in (("qkvz", (key, 2 * key, 2 * key + value)), ("ba", (each,))):
            rows = np.split(self.w[f"linear_attn.in_proj_{name}.weight"], groups)
            found += [np.concatenate(pieces) for pieces in zip(*(np.split(g, ends) for g in rows), strict=True)]
        return found

    def alike(self, index: int, count: int) -> Arrays:
        """What both sides hold alike."""
        keys = self.c["linear_num_key_heads"] * self.c["linear_key_head_dim"]
        w = {name.removeprefix("linear_attn."): array for name, array in self.w.items()}
        channels = np.split(w["conv1d.weight"], (keys, 2 * keys))
        return {
            "conv1d.weight": np.concatenate([part(each, index, count) for each in channels]),
            "dt_bias": part(w["dt_bias"], index, count),
            "A_log": part(w["A_log"], index, count),
            "out_proj.weight": part(w["out_proj.weight"], index, count, 1),
        }


@dataclass(frozen=True)
class GatedAttention:
    """Attention with norms of heads, whose query projection has a gate behind each head."""

    plain = Attention(qk_norm=True)

    def tensors(self, c: Config) -> Dims:
        name = "self_attn.q_proj.weight"
        return self.plain.tensors(c) | {name: (2 * c["num_attention_heads"] * c["head_dim"], c["hidden_size"])}

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        """Per key/value group: its query heads, the gates of all of these, its k, its v; then cut."""
        params = self.plain.megatron(self._queries(w, c), c, at, te)
        groups, rows = c["num_key_value_heads"], []
        for group in range(groups):
            heads = np.split(part(w["self_attn.q_proj.weight"], group, groups), c["num_attention_heads"] // groups)
            for half in (0, 1):
                rows += [part(head, half, 2) for head in heads]
            rows += [part(w[f"self_attn.{name}_proj.weight"], group, groups) for name in "kv"]
        params["self_attention.linear_qkv.weight"] = part(np.concatenate(rows), at["tp"], at["tp_size"])
        return params

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        """This rank's query heads with their gates behind them, then its keys and values."""
        params = self.plain.vllm(self._queries(w, c), c, at)
        own = part(w["self_attn.q_proj.weight"], at.tp, at.tp_size)
        fused = params["self_attn.qkv_proj.weight"]
        queries = c["num_attention_heads"] * c["head_dim"] // at.tp_size
        params["self_attn.qkv_proj.weight"] = np.concatenate([own, fused[queries:]])
        return params

    def _queries(self, w: Arrays, c: Config) -> Arrays:
        """The same tensors without gates."""
        heads = np.split(w["self_attn.q_proj.weight"], c["num_attention_heads"])
        return {**w, "self_attn.q_proj.weight": np.concatenate([part(head, 0, 2) for head in heads])}
