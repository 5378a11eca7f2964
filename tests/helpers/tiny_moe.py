"""Tiny Qwen3-MoE checkpoints, written by hand: config.json, safetensors, a byte-level tokenizer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class TinyMoe:
    """Sizes. head_dim is the smallest that vLLM's CPU attention takes."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    top_k: int = 2
    ffn: int = 32
    vocab: int = 320
    tied: bool = False

    def config(self) -> dict[str, object]:
        """config.json as transformers writes it."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.ffn,
            "intermediate_size": self.ffn,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "bos_token_id": 256,
            "eos_token_id": 257,
            "pad_token_id": 258,
        }

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every HF tensor and its shape."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "self_attn.q_proj.weight", (q, hidden)
            yield prefix + "self_attn.k_proj.weight", (kv, hidden)
            yield prefix + "self_attn.v_proj.weight", (kv, hidden)
            yield prefix + "self_attn.o_proj.weight", (hidden, q)
            yield prefix + "self_attn.q_norm.weight", (self.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (self.head_dim,)
            yield prefix + "input_layernorm.weight", (hidden,)
            yield prefix + "post_attention_layernorm.weight", (hidden,)
            yield prefix + "mlp.gate.weight", (self.experts, hidden)
            for expert in range(self.experts):
                yield f"{prefix}mlp.experts.{expert}.gate_proj.weight", (self.ffn, hidden)
                yield f"{prefix}mlp.experts.{expert}.up_proj.weight", (self.ffn, hidden)
                yield f"{prefix}mlp.experts.{expert}.down_proj.weight", (hidden, self.ffn)
        yield "model.norm.weight", (hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, hidden)


Weights = dict[str, torch.Tensor]


def random_weights(moe: TinyMoe, seed: int) -> Weights:
    """Every tensor differs between seeds, the norms too."""

    def values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1 + 0.1 * noise
        return noise * (1.0 if "embed" in name else 0.3 if "gate.weight" in name or "lm_head" in name else 0.15)

    return fill(moe, values)


def fill(moe: TinyMoe, values: Callable[[str, tuple[int, ...]], torch.Tensor]) -> Weights:
    """All tensors in bf16, from a function of name and shape."""
    return {name: values(name, shape).to(torch.bfloat16).contiguous() for name, shape in moe.shapes()}


def write_checkpoint(folder: Path, moe: TinyMoe, weights: Weights) -> Path:
    """A folder that `vllm serve` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(moe.config(), indent=1))
    write_tokenizer(folder, moe.vocab)
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer of this many tokens, as `transformers` reads it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "<bos>", "<eos>", "<pad>", *(f"<{i}>" for i in range(len(alphabet) + 3, vocab))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<eos>", "<pad>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "model_max_length": 2048}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
