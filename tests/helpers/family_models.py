"""Small models of every family: what their config.json says, Megatron's settings, and `transformers`' model of them.

Megatron's model of them: `family_megatron.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SEQUENCE = 24

COMMON: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}


@dataclass(frozen=True)
class FamilyModel:
    """`hf`: fields of config.json beside COMMON; `megatron` and `gpt`: of TransformerConfig and GPTModel.

    `delta`: layers with a gated delta net. `centred`: its norms multiply by 1 + weight, but for one behind a delta net.
    """

    hf: dict[str, Any]
    megatron: dict[str, Any] = field(default_factory=dict)
    gpt: dict[str, Any] = field(default_factory=dict)
    mla: bool = False
    delta: tuple[int, ...] = ()
    centred: bool = False

    def config(self, family: str) -> dict[str, Any]:
        return {**COMMON, "model_type": family, **self.hf}


def _softmax_moe(experts: int, ffn: int, pre_softmax: bool = False) -> dict[str, Any]:
    return dict(num_moe_experts=experts, moe_router_topk=2, moe_ffn_hidden_size=ffn, moe_router_pre_softmax=pre_softmax)


SIGMOID_ROUTER = dict(
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
    moe_router_dtype="fp32",
)
DENSE_FIRST = dict(moe_layer_freq=[0, 1, 1], moe_shared_expert_intermediate_size=40)
HF_DENSE_FIRST = {
    **MOE,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = dict(q_lora_rank=28, kv_lora_rank=20, v_head_dim=8)
HF_LATENT = dict(num_key_value_heads=4, head_dim=4, qk_nope_head_dim=12, qk_rope_head_dim=4, **LATENT)
LATENT |= dict(qk_layernorm=True, num_query_groups=4, kv_channels=12, qk_head_dim=12, qk_pos_emb_head_dim=4)
LATENT |= dict(rope_type="rope")
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
)
FAMILY_MODELS = {
    "qwen3_moe": FamilyModel(
        {**MOE, "num_experts": 6, "norm_topk_prob": True}, {"qk_layernorm": True, **_softmax_moe(6, 20)}
    ),
    "qwen2_moe": FamilyModel(
        {**MOE, "num_experts": 6, "head_dim": 12, "shared_expert_intermediate_size": 28, "norm_topk_prob": False},
        {
            "add_qkv_bias": True,
            "moe_shared_expert_intermediate_size": 28,
            "moe_shared_expert_gate": True,
            **_softmax_moe(6, 20, pre_softmax=True),
        },
    ),
    "qwen3_next": FamilyModel(
        {
            **MOE,
            "num_experts": 6,
            "shared_expert_intermediate_size": 28,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 2,
            **DELTA,
        },
        {
            "qk_layernorm": True,
            "attention_output_gate": True,
            "moe_shared_expert_intermediate_size": 28,
            "moe_shared_expert_gate": True,
            "deterministic_mode": True,
            **_softmax_moe(6, 20),
            **DELTA,
        },
        {"rotary_percent": 0.25},
        delta=(0, 2),
        centred=True,
    ),
    "qwen3": FamilyModel({}, {"qk_layernorm": True}),
    "llama": FamilyModel({}),
    "mixtral": FamilyModel({"num_local_experts": 6, "num_experts_per_tok": 2}, _softmax_moe(6, 40)),
    "glm4_moe": FamilyModel(
        {**HF_DENSE_FIRST, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
        {"add_qkv_bias": True, "qk_layernorm": True, **_softmax_moe(8, 20), **SIGMOID_ROUTER, **DENSE_FIRST},
        {"rotary_percent": 0.5},
    ),
    "gpt_oss": FamilyModel(
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": COMMON["rope_theta"]},
        },
        {
            **_softmax_moe(6, 40),
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "activation_func": "quick_gelu",
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
        },
    ),
    "deepseek_v2": FamilyModel(
        {**HF_DENSE_FIRST, **HF_LATENT, "norm_topk_prob": False, "topk_method": "greedy"},
        {**_softmax_moe(8, 20, pre_softmax=True), "moe_router_topk_scaling_factor": 2.5, **DENSE_FIRST, **LATENT},
        mla=True,
    ),
    "deepseek_v3": FamilyModel(
        {
            **HF_DENSE_FIRST,
            # Megatron scores a group by its best top_k / topk_group experts, transformers by its best two.
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            **HF_LATENT,
        },
        {
            **_softmax_moe(12, 20),
            **SIGMOID_ROUTER,
            **DENSE_FIRST,
            "moe_router_topk": 4,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            **LATENT,
        },
        mla=True,
    ),
}


def random_transformers(family: str, seed: int = 5, **sizes: Any) -> Any:
    """A random model of `transformers`, fp32, in which no two tensors are alike."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**FAMILY_MODELS[family].config(family), **sizes})
    generator = torch.Generator().manual_seed(seed)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, tensor in (*reference.named_parameters(), *reference.named_buffers()):
        if name.endswith("inv_freq"):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        scale = 0.2 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
        is_one = "norm" in name and ("linear_attn" in name or not FAMILY_MODELS[family].centred)
        tensor.data.copy_((1.0 if is_one else 0.0) + scale * noise)
    return reference


def write_transformers(family: str, folder: Path, **sizes: Any) -> torch.Tensor:
    """A random model as `transformers` saves it, in `folder`; returns its logits, fp32, for `tokens()`."""
    reference = random_transformers(family, **sizes)
    reference.save_pretrained(folder)
    with torch.no_grad():
        return reference(tokens()).logits.float()


def tokens() -> torch.Tensor:
    return torch.randint(0, COMMON["vocab_size"], (2, SEQUENCE), generator=torch.Generator().manual_seed(9))
