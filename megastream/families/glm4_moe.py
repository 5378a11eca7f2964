"""GLM-4.5-MoE: the first layers dense, a shared expert, and a router with an fp32 bias for the choice of experts.

Biases of queries, keys and values and norms of their heads are there as config.json says. Layers of multi-token
prediction are of files and trainers only: vLLM loads them for speculative decoding, and engines with a draft model are
refused.
"""

from __future__ import annotations

from functools import partial

from megastream.families.config import flag, number
from megastream.families.decoder import behind_dense, decoder_shape, decoder_sizes, expert_groups, shared_ffn
from megastream.families.family import Family
from megastream.families.rows import (
    ATTENTION,
    CORRECTION_BIAS,
    DENSE_MLP,
    MTP,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERTS,
    SHARED_IN_EXPERTS,
    ends,
    experts,
    router,
)
from megastream.families.types import ModelShape

ROWS = (
    *ends(spares=False),
    *ATTENTION,
    QKV_BIAS,
    *QK_NORM,
    router(fp32=("engine",)),
    CORRECTION_BIAS,
    *experts(),
    *SHARED_EXPERTS,
    *DENSE_MLP,
    *MTP,
)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `Glm4MoeConfig`. ValueError names a field that is missing or not a number."""
    number(config, "intermediate_size", least=1)
    return decoder_shape(
        "glm4_moe",
        config,
        num_experts=number(config, "n_routed_experts", least=1),
        top_k=number(config, "num_experts_per_tok"),
        expert_ffn=number(config, "moe_intermediate_size"),
    )


def sizes(shape: ModelShape) -> dict[str, int]:
    """The numbers that the table's dims are written in."""
    usual = decoder_sizes(shape)
    biased, normed = flag(shape.raw, "attention_bias"), flag(shape.raw, "use_qk_norm")
    return {
        **usual,
        "q_bias": usual["q"] if biased else 0,
        "kv_bias": usual["kv"] if biased else 0,
        "head_norm": shape.head_dim if normed else 0,
        "shared_ffn": shared_ffn(shape),
    }


FAMILY = Family(
    name="glm4_moe",
    rows=ROWS,
    read=read,
    sizes=sizes,
    is_moe=behind_dense,
    num_groups=partial(expert_groups, default=1),
    has_eplb=True,
    aliases=(
        ("mlp.gate.e_score_correction_bias", "mlp.experts.routed_experts.e_score_correction_bias"),
        ("mlp.shared_experts.", SHARED_IN_EXPERTS),
    ),
)
