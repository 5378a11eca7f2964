"""DeepSeek-V3, Moonlight and Kimi-K2: latent attention (MLA), the first layers dense, shared experts, and a router with
an fp32 bias for the choice of experts.

Rotary dims lie in pairs on all three sides, so nothing is permuted. vLLM fuses the two projections to latents where
queries have one (`q_lora_rank`); this is its form with MLA, not the one that `VLLM_MLA_DISABLE` gives. Layers of
multi-token prediction are of files and trainers only: vLLM loads them into a draft model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megastream.families.config import number
from megastream.families.decoder import (
    behind_dense,
    decoder_shape,
    decoder_sizes,
    expert_groups,
    refuse_unless,
    shared_ffn,
)
from megastream.families.family import Family
from megastream.families.rows import (
    CORRECTION_BIAS,
    DENSE_MLP,
    GATE_IN_EXPERTS,
    INPUT_NORM,
    MLP_NORM,
    MTP,
    SHARED_EXPERTS,
    SHARED_IN_EXPERTS,
    ends,
    engine_row,
    experts,
    hf,
    layer_row,
    linear,
    router,
    trainer_row,
)
from megastream.families.types import ModelShape

_Q_DOWN = linear("self_attn.q_a_proj.weight", "q_lora", "hidden")
_KV_DOWN = linear("self_attn.kv_a_proj_with_mqa.weight", "kv_a", "hidden")
_Q_NORM = ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight")
_KV_NORM = ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight")

LATENT_ATTENTION = (
    INPUT_NORM,
    # Of queries with a latent, and without.
    trainer_row("every", _Q_DOWN, "self_attention.linear_q_down_proj.weight", "latent"),
    layer_row("every", hf("self_attn.q_a_layernorm.weight", "q_lora"), _Q_NORM),
    layer_row(
        "every", linear("self_attn.q_b_proj.weight", "q", "q_lora"), "self_attention.linear_q_up_proj.weight", "column"
    ),
    layer_row(
        "every",
        linear("self_attn.q_proj.weight", "q_direct", "hidden"),
        "self_attention.linear_q_proj.weight",
        "column",
    ),
    trainer_row("every", _KV_DOWN, "self_attention.linear_kv_down_proj.weight", "latent"),
    engine_row("every", (_Q_DOWN, _KV_DOWN), "self_attn.fused_qkv_a_proj.weight"),
    engine_row("every", (replace(_KV_DOWN, dims=("kv_a_alone", "hidden")),), "self_attn.kv_a_proj_with_mqa.weight"),
    layer_row("every", hf("self_attn.kv_a_layernorm.weight", "kv_lora"), _KV_NORM),
    layer_row(
        "every",
        linear("self_attn.kv_b_proj.weight", "kv_b", "kv_lora"),
        "self_attention.linear_kv_up_proj.weight",
        "column",
    ),
    layer_row("every", linear("self_attn.o_proj.weight", "hidden", "v"), "self_attention.linear_proj.weight", "row"),
    MLP_NORM,
)
ROWS = (
    *ends(spares=False),
    *LATENT_ATTENTION,
    router(),
    CORRECTION_BIAS,
    *experts(),
    *SHARED_EXPERTS,
    *DENSE_MLP,
    *MTP,
)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `DeepseekV3Config`. ValueError names a field that is missing or that no row is for."""
    refuse_unless("deepseek_v3", config, topk_method="noaux_tc")
    return latent_shape("deepseek_v3", config)


def latent_shape(family: str, config: dict[str, object]) -> ModelShape:
    """Of a family with this attention and experts. Errors as of `read`."""
    refuse_unless(family, config, attention_bias=False)
    number(config, "intermediate_size", least=1)
    head_dim = number(config, "qk_nope_head_dim") + number(config, "qk_rope_head_dim")
    shape = decoder_shape(
        family,
        {**config, "head_dim": head_dim},
        num_experts=number(config, "n_routed_experts", least=1),
        top_k=number(config, "num_experts_per_tok"),
        expert_ffn=number(config, "moe_intermediate_size"),
    )
    shape = replace(shape, raw=dict(config))
    sizes(shape)  # reads the widths of the latents
    return shape


def sizes(shape: ModelShape) -> dict[str, int]:
    """The numbers that the table's dims are written in."""
    raw, usual = shape.raw, decoder_sizes(shape)
    q_lora = number(raw, "q_lora_rank", 0)
    kv_lora, v_dim = number(raw, "kv_lora_rank", least=1), number(raw, "v_head_dim", least=1)
    kv_a = kv_lora + number(raw, "qk_rope_head_dim")
    return {
        **usual,
        "q_lora": q_lora,
        "q_direct": 0 if q_lora else usual["q"],
        "kv_lora": kv_lora,
        "kv_a": kv_a,
        "kv_a_alone": 0 if q_lora else kv_a,
        "kv_b": shape.num_heads * (number(raw, "qk_nope_head_dim") + v_dim),
        "v": shape.num_heads * v_dim,
        "shared_ffn": shared_ffn(shape),
    }


ATTENTION = "self_attn.mla_attn.mla_attn"
ALIASES = (
    GATE_IN_EXPERTS,
    ("mlp.shared_experts.", SHARED_IN_EXPERTS),
    *(
        (f"self_attn.{name}.", f"self_attn.mla_attn.{name}.")
        for name in ("o_proj", "q_a_layernorm", "q_b_proj", "q_proj")
    ),
)
"""vLLM's module of the attention, and the second names that it has for some of the others."""
FAMILY = Family(
    name="deepseek_v3",
    rows=ROWS,
    read=read,
    sizes=sizes,
    is_moe=behind_dense,
    num_groups=partial(expert_groups, default=8),
    has_eplb=True,
    attention=ATTENTION,
    aliases=ALIASES,
)
