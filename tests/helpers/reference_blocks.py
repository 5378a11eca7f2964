"""What decoder layers are made of, cut by hand: each block's full tensors, and what one Megatron or vLLM rank holds.

Nothing here uses `layout/`, `families/` or `plan/`: every array is sliced from the full tensors `w` of its layer, whose
names are given inside the layer. `at` is where a rank stands: Megatron's coordinates, or an `EngineRank`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Dims = dict[str, tuple[int, ...]]
Config = dict[str, Any]


@dataclass(frozen=True)
class EngineRank:
    """`cut`: index and count of this rank's part of every expert; `experts`: global numbers of those it has."""

    tp: int
    tp_size: int
    experts: list[int]
    cut: tuple[int, int]


def part(array: np.ndarray, index: int, count: int, dim: int = 0) -> np.ndarray:
    """The index-th of `count` equal parts along a dim."""
    return np.split(array, count, axis=dim)[index]


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def num_experts(c: Config) -> int:
    """Routed experts, under any of the names that configs have for them."""
    return int(next((c[key] for key in EXPERT_COUNTS if key in c), 0))


@dataclass(frozen=True)
class Norms:
    """The norms in front of attention and MLP. Transformer Engine puts each into the linear behind it, if it is one."""

    fuses: tuple[bool, bool] = (True, False)
    into: str = "linear_qkv"

    def tensors(self, c: Config) -> Dims:
        return dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (c["hidden_size"],))

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        first = f"self_attention.{self.into}.layer_norm_weight" if te and self.fuses[0] else "input_layernorm.weight"
        second = "mlp.linear_fc1.layer_norm_weight" if te and self.fuses[1] else "pre_mlp_layernorm.weight"
        return {first: w["input_layernorm.weight"], second: w["post_attention_layernorm.weight"]}

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        return {name: w[name] for name in self.tensors(c)}


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention."""

    bias: bool = False
    qk_norm: bool = False

    def tensors(self, c: Config) -> Dims:
        hidden, dim = c["hidden_size"], c["head_dim"]
        q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
        dims: Dims = {f"self_attn.{name}_proj.weight": (n, hidden) for name, n in (("q", q), ("k", kv), ("v", kv))}
        if self.bias:
            dims |= {f"self_attn.{name}_proj.bias": (n,) for name, n in (("q", q), ("k", kv), ("v", kv))}
        norms = [f"self_attn.{n}_norm.weight" for n in "qk"] if self.qk_norm else []
        return dims | {"self_attn.o_proj.weight": (hidden, q)} | dict.fromkeys(norms, (dim,))

    @property
    def what(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.bias else ("weight",)

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        """The fused rows: per key/value group its query heads, its k, its v; then cut."""
        params = {"self_attention.linear_proj.weight": part(w["self_attn.o_proj.weight"], at["tp"], at["tp_size"], 1)}
        groups = c["num_key_value_heads"]
        for what in self.what:
            rows = [part(w[f"self_attn.{n}_proj.{what}"], group, groups) for group in range(groups) for n in "qkv"]
            params[f"self_attention.linear_qkv.{what}"] = part(np.concatenate(rows), at["tp"], at["tp_size"])
        if self.qk_norm:
            params |= {f"self_attention.{n}_layernorm.weight": w[f"self_attn.{n}_norm.weight"] for n in "qk"}
        return params

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        """This rank's query heads, then its key heads, then its value heads; at least one of each."""
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        first = at.tp * kv_heads // at.tp_size
        own = {
            "q": range(at.tp * heads // at.tp_size, (at.tp + 1) * heads // at.tp_size),
            "k": range(first, max((at.tp + 1) * kv_heads // at.tp_size, first + 1)),
        }
        own["v"] = own["k"]
        params = {"self_attn.o_proj.weight": part(w["self_attn.o_proj.weight"], at.tp, at.tp_size, 1)}
        for what in self.what:
            rows = [w[f"self_attn.{n}_proj.{what}"][h * dim : (h + 1) * dim] for n in "qkv" for h in own[n]]
            params[f"self_attn.qkv_proj.{what}"] = np.concatenate(rows)
        if self.qk_norm:
            params |= {f"self_attn.{n}_norm.weight": w[f"self_attn.{n}_norm.weight"] for n in "qk"}
        return params


@dataclass(frozen=True)
class LatentAttention:
    """MLA: latents of queries (if `q_lora_rank`) and of keys and values; heads are cut, latents are not (but by
    Megatron's local spec)."""

    def tensors(self, c: Config) -> Dims:
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        q_lora, kv_lora = c["q_lora_rank"], c["kv_lora_rank"]
        nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        queries: Dims = {"q_proj.weight": (heads * (nope + rope), hidden)}
        if q_lora:
            queries = {"q_a_proj.weight": (q_lora, hidden), "q_a_layernorm.weight": (q_lora,)}
            queries["q_b_proj.weight"] = heads * (nope + rope), q_lora
        rest: Dims = {
            "kv_a_proj_with_mqa.weight": (kv_lora + rope, hidden),
            "kv_a_layernorm.weight": (kv_lora,),
            "kv_b_proj.weight": (heads * (nope + v), kv_lora),
            "o_proj.weight": (hidden, heads * v),
        }
        return {f"self_attn.{name}": dims for name, dims in {**queries, **rest}.items()}

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        cut = at["tp"], at["tp_size"]
        params = {
            "linear_kv_up_proj.weight": part(w["self_attn.kv_b_proj.weight"], *cut),
            "linear_proj.weight": part(w["self_attn.o_proj.weight"], *cut, dim=1),
        }
        downs = {"linear_kv_down_proj.weight": w["self_attn.kv_a_proj_with_mqa.weight"]}
        norms = {"kv": w["self_attn.kv_a_layernorm.weight"]}
        if c["q_lora_rank"]:
            params["linear_q_up_proj.weight"] = part(w["self_attn.q_b_proj.weight"], *cut)
            downs["linear_q_down_proj.weight"] = w["self_attn.q_a_proj.weight"]
            norms["q"] = w["self_attn.q_a_layernorm.weight"]
        else:
            params["linear_q_proj.weight"] = part(w["self_attn.q_proj.weight"], *cut)
        params |= {name: array if te else part(array, *cut) for name, array in downs.items()}
        norm = "linear_{}_up_proj.layer_norm_weight" if te else "{}_layernorm.weight"
        params |= {norm.format(name): array for name, array in norms.items()}
        return {f"self_attention.{name}": array for name, array in params.items()}

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        down = w["self_attn.kv_a_proj_with_mqa.weight"]
        if c["q_lora_rank"]:
            columns = ["q_b_proj.weight", "kv_b_proj.weight"]
            whole = {"fused_qkv_a_proj.weight": np.concatenate([w["self_attn.q_a_proj.weight"], down])}
            whole["q_a_layernorm.weight"] = w["self_attn.q_a_layernorm.weight"]
        else:
            columns, whole = ["q_proj.weight", "kv_b_proj.weight"], {"kv_a_proj_with_mqa.weight": down}
        params = {**whole, "kv_a_layernorm.weight": w["self_attn.kv_a_layernorm.weight"]}
        params |= {name: part(w[f"self_attn.{name}"], at.tp, at.tp_size) for name in columns}
        params["o_proj.weight"] = part(w["self_attn.o_proj.weight"], at.tp, at.tp_size, 1)
        return {f"self_attn.{name}": array for name, array in params.items()}


def mlp_tensors(prefix: str, ffn: int, hidden: int, names: tuple[str, str, str]) -> Dims:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: (ffn, hidden), up: (ffn, hidden), down: (hidden, ffn)}


LLAMA_NAMES = ("gate_proj", "up_proj", "down_proj")


def cut_mlp(
    w: Arrays, prefix: str, index: int, count: int, names: tuple[str, str, str], swap: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """([gate_r; up_r], a column cut of down): what one rank of either side has. `swap` plants up before gate."""
    halves = [part(w[f"{prefix}{name}.weight"], index, count) for name in names[:2]]
    return np.concatenate(halves[::-1] if swap else halves), part(w[f"{prefix}{names[2]}.weight"], index, count, 1)


@dataclass(frozen=True)
class Mlp:
    """A dense MLP, or an expert that every token passes; cut by tensor parallelism on both sides."""

    width: int
    prefix: str = "mlp."
    trainer: str = "mlp."

    def tensors(self, c: Config) -> Dims:
        return mlp_tensors(self.prefix, self.width, c["hidden_size"], LLAMA_NAMES)

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        fc1, fc2 = cut_mlp(w, self.prefix, at["tp"], at["tp_size"], LLAMA_NAMES, bool(at.get("swap")))
        return {f"{self.trainer}linear_fc1.weight": fc1, f"{self.trainer}linear_fc2.weight": fc2}

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        fc1, fc2 = cut_mlp(w, self.prefix, at.tp, at.tp_size, LLAMA_NAMES)
        return {f"{self.prefix}gate_up_proj.weight": fc1, f"{self.prefix}down_proj.weight": fc2}


@dataclass(frozen=True)
class Whole:
    """A tensor that every rank has as it is, under a name of each side."""

    hf: str
    dims: tuple[int, ...]
    trainer: str
    engine: str = ""

    def tensors(self, c: Config) -> Dims:
        return {self.hf: self.dims}

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        return {self.trainer: w[self.hf]}

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        return {self.engine or self.hf: w[self.hf]}


@dataclass(frozen=True)
class Experts:
    """Routed experts with their router: one parameter each on the trainer, cut by ETP; stacked on the engine."""

    width: int
    prefix: str = "mlp."
    names: tuple[str, str, str] = LLAMA_NAMES

    def tensors(self, c: Config) -> Dims:
        dims: Dims = {f"{self.prefix}gate.weight": (num_experts(c), c["hidden_size"])}
        for expert in range(num_experts(c)):
            dims |= mlp_tensors(f"{self.prefix}experts.{expert}.", self.width, c["hidden_size"], self.names)
        return dims

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        params = {"mlp.router.weight": w[f"{self.prefix}gate.weight"]}
        for expert in local_experts(c, at):
            prefix, where = f"{self.prefix}experts.{expert}.", (at["etp"], at["etp_size"])
            fc1, fc2 = cut_mlp(w, prefix, *where, self.names, bool(at.get("swap")))
            params[expert_name("linear_fc1", "weight", expert, te)] = fc1
            params[expert_name("linear_fc2", "weight", expert, te)] = fc2
        return params

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        pairs = [cut_mlp(w, f"{self.prefix}experts.{expert}.", *at.cut, self.names) for expert in at.experts]
        routed = f"{self.prefix}experts.routed_experts."
        return {
            f"{self.prefix}gate.weight": w[f"{self.prefix}gate.weight"],
            f"{routed}w13_weight": np.stack([fc1 for fc1, _ in pairs]),
            f"{routed}w2_weight": np.stack([fc2 for _, fc2 in pairs]),
        }


def local_experts(c: Config, at: dict[str, int]) -> range:
    """Global numbers of the experts of a Megatron rank."""
    count = num_experts(c) // at["ep_size"]
    return range(at["ep"] * count, (at["ep"] + 1) * count)


def expert_name(linear: str, what: str, expert: int, te: bool) -> str:
    """TEGroupedMLP's name, or SequentialMLP's."""
    return "mlp.experts." + (f"{linear}.{what}{expert}" if te else f"local_experts.{expert}.{linear}.{what}")


@dataclass(frozen=True)
class OutputBias:
    """A bias of the attention's output, and sinks: one number for each query head."""

    def tensors(self, c: Config) -> Dims:
        return {"self_attn.o_proj.bias": (c["hidden_size"],), "self_attn.sinks": (c["num_attention_heads"],)}

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        sinks = part(w["self_attn.sinks"], at["tp"], at["tp_size"])
        bias = {"self_attention.linear_proj.bias": w["self_attn.o_proj.bias"]}
        return {**bias, "self_attention.core_attention.softmax_offset": sinks}

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        sinks = part(w["self_attn.sinks"], at.tp, at.tp_size)
        return {"self_attn.o_proj.bias": w["self_attn.o_proj.bias"], "self_attn.sinks": sinks}


@dataclass(frozen=True)
class Renamed:
    """A block whose parameters the engine calls `attn.…` where others say `self_attn.…`."""

    block: Any

    def tensors(self, c: Config) -> Dims:
        return dict(self.block.tensors(c))

    def megatron(self, w: Arrays, c: Config, at: dict[str, int], te: bool) -> Arrays:
        return dict(self.block.megatron(w, c, at, te))

    def vllm(self, w: Arrays, c: Config, at: EngineRank) -> Arrays:
        return {name.replace("self_attn.", "attn."): array for name, array in self.block.vllm(w, c, at).items()}
