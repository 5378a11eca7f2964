"""Small models of every family: in `transformers` as in Megatron, the latter filled through our trainer layout.

Megatron's side is built here by hand, from its own local specs, so that it does not depend on what the product builds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megastream.families import family_of, load_shape
from megastream.layout.shard import BufferSpec, RankLayout
from megastream.layout.trainer import TrainerParam, trainer_rank_layout
from megastream.trainer import compat

SEQUENCE = 24
ALONE = {f"{axis}{end}": n for axis in ("tp", "etp", "pp", "ep") for end, n in (("", 0), ("_size", 1))}

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
    """`hf`: fields of config.json beside COMMON; `megatron` and `gpt`: of TransformerConfig and GPTModel."""

    hf: dict[str, Any]
    megatron: dict[str, Any] = field(default_factory=dict)
    gpt: dict[str, Any] = field(default_factory=dict)
    mla: bool = False

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
    "deepseek_v3": FamilyModel(
        {
            **HF_DENSE_FIRST,
            # Megatron scores a group by its best top_k / topk_group experts, transformers by its best two.
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "num_key_value_heads": 4,
            "head_dim": 4,
            "q_lora_rank": 28,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        {
            **_softmax_moe(12, 20),
            **SIGMOID_ROUTER,
            **DENSE_FIRST,
            "moe_router_topk": 4,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "qk_layernorm": True,
            "num_query_groups": 4,
            "kv_channels": 12,
            "q_lora_rank": 28,
            "kv_lora_rank": 20,
            "qk_head_dim": 12,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8,
            "rope_type": "rope",
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
        tensor.data.copy_((1.0 if "norm" in name else 0.0) + scale * noise)
    return reference


def write_transformers(family: str, folder: Path) -> torch.Tensor:
    """A random model as `transformers` saves it, in `folder`; returns its logits, fp32, for `tokens()`."""
    reference = random_transformers(family)
    reference.save_pretrained(folder)
    with torch.no_grad():
        return reference(tokens()).logits.float()


def tokens() -> torch.Tensor:
    return torch.randint(0, COMMON["vocab_size"], (2, SEQUENCE), generator=torch.Generator().manual_seed(9))


def megatron_logits(
    rank: int, world_size: int, init_method: str, family: str, folder: str, swapped: tuple[str, str] | None = None
) -> Any:
    """Logits of Megatron's model with the weights in `folder`, as numpy; with two tensors exchanged if asked to."""
    from safetensors.torch import load_file

    compat.install()
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    raw = json.loads((Path(folder) / "config.json").read_text())
    weights = load_file(Path(folder) / "model.safetensors")
    if swapped:
        weights |= {swapped[0]: weights[swapped[1]], swapped[1]: weights[swapped[0]]}
    model = build(family).eval()
    fill(model, raw, weights)
    ahead = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(diagonal=1)[None, None]
    with torch.no_grad():
        return model(tokens(), torch.arange(SEQUENCE)[None].expand(2, -1), ahead).float().numpy()


def build(family: str) -> Any:
    """GPTModel of a family in fp32, local specs, one rank. Needs megatron's mesh."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    ours = FAMILY_MODELS[family]
    c = ours.config(family)
    fixed: dict[str, Any] = dict(
        num_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        ffn_hidden_size=c["intermediate_size"],
        num_attention_heads=c["num_attention_heads"],
        num_query_groups=c["num_key_value_heads"],
        kv_channels=c["head_dim"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=c["rms_norm_eps"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        persist_layer_norm=False,
        params_dtype=torch.float32,
    )
    fixed |= ours.megatron
    fusions = ("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion")
    if fixed["activation_func"] == "quick_gelu":
        fixed["activation_func"] = quick_gelu
    kind = MLATransformerConfig if ours.mla else TransformerConfig
    transformer = kind(**fixed, **dict.fromkeys((*fusions, "apply_rope_fusion"), False))
    spec = get_gpt_decoder_block_spec(transformer, use_transformer_engine=False, normalization="RMSNorm")
    if ours.mla:
        _run_latent_attention(spec)
    rope: dict[str, Any] = dict(position_embedding_type="rope", rotary_base=int(c["rope_theta"]))
    return GPTModel(
        transformer,
        spec,
        vocab_size=c["vocab_size"],
        max_sequence_length=c["max_position_embeddings"],
        share_embeddings_and_output_weights=c["tie_word_embeddings"],
        **{**rope, **ours.gpt},
    )


def _run_latent_attention(spec: Any) -> None:
    """Megatron's MLA asks Transformer Engine's attention for head sizes that its plain one does not take."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class OfTwoWidths(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
            super().__init__(*args, **named)
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    multi_latent_attention.HAVE_TE = False
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = OfTwoWidths


def fill(model: Any, raw: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Writes every parameter of a lone rank through our trainer layout; all of it, and from all of the tensors."""
    shape = load_shape(raw)
    family = family_of(shape)
    specs = {spec.name: spec.shape for spec in family.tensors(shape)}
    assert {name: family.file_shape(name, shape) for name in specs} == {n: tuple(t.shape) for n, t in weights.items()}
    held = dict(model.named_parameters())
    # The router's bias is a buffer; the other ones belong to no checkpoint.
    held |= {name: tensor for name, tensor in model.named_buffers() if name.endswith("router.expert_bias")}
    for tensor in held.values():
        tensor.data.fill_(float("nan"))
    params = [TrainerParam(name, tuple(tensor.shape), name, 0) for name, tensor in held.items()]
    buffers = [BufferSpec(name, tensor.numel(), "float32") for name, tensor in held.items()]
    layout: RankLayout = trainer_rank_layout(
        family, shape, rank=0, world_size=1, coords=ALONE, params=params, buffers=buffers
    )
    for shard in layout.shards:
        region = held[shard.buffer].data.view(-1).as_strided(shard.box.shape, shard.strides, shard.offset)
        region.copy_(weights[shard.tensor].view(specs[shard.tensor])[tuple(map(slice, shard.box.lo, shard.box.hi))])
    assert [name for name, tensor in held.items() if tensor.isnan().any()] == []
    assert {shard.tensor for shard in layout.shards} == set(weights)
