"""Mixtral: the experts' gate, up and down are called w1, w3 and w2, and every layer has them.

Its vLLM names are read from vLLM 0.32's source; its own load was not compared.
"""

from __future__ import annotations

from megastream.families.config import number
from megastream.families.decoder import decoder_shape, decoder_sizes, only_experts
from megastream.families.family import Family
from megastream.families.rows import ATTENTION, ends, experts, router
from megastream.families.types import ModelShape

_MOE = "block_sparse_moe."
ROWS = (*ends(spares=True), *ATTENTION, router(f"{_MOE}gate.weight"), *experts(f"{_MOE}experts.", ("w1", "w3", "w2")))


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `MixtralConfig`. ValueError names a field that is missing or not a number."""
    return decoder_shape(
        "mixtral",
        config,
        num_experts=number(config, "num_local_experts", least=1),
        top_k=number(config, "num_experts_per_tok"),
        expert_ffn=number(config, "intermediate_size"),
    )


FAMILY = Family(name="mixtral", rows=ROWS, read=read, sizes=decoder_sizes, is_moe=only_experts, has_eplb=True)
