"""DeepSeek-V2 and V2-Lite: DeepSeek-V3's latent attention (MLA), dense first layers and shared experts; the router has
no bias for the choice of experts, and there are no layers of multi-token prediction.

How experts are chosen (`greedy` or in groups) changes no weight.
"""

from __future__ import annotations

from functools import partial

from megastream.families import deepseek_v3
from megastream.families.decoder import behind_dense, expert_groups
from megastream.families.family import Family
from megastream.families.rows import DENSE_MLP, SHARED_EXPERTS, ends, experts, router
from megastream.families.types import ModelShape

ROWS = (
    *ends(spares=False),
    *deepseek_v3.LATENT_ATTENTION,
    router(),
    *experts(),
    *SHARED_EXPERTS,
    *DENSE_MLP,
)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `DeepseekV2Config`. ValueError names a field that is missing or that no row is for."""
    if config.get("topk_method") == "noaux_tc":
        raise ValueError("config.json field topk_method is 'noaux_tc'; deepseek_v2 has no table for routers' biases")
    return deepseek_v3.latent_shape("deepseek_v2", config)


FAMILY = Family(
    name="deepseek_v2",
    rows=ROWS,
    read=read,
    sizes=deepseek_v3.sizes,
    is_moe=behind_dense,
    num_groups=partial(expert_groups, default=1),
    has_eplb=True,
    attention=deepseek_v3.ATTENTION,
    aliases=deepseek_v3.ALIASES,
)
