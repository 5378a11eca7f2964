"""Dense Qwen3. Its vLLM names are read from vLLM 0.32's source; its own load was not compared."""

from __future__ import annotations

from megastream.families.config import number
from megastream.families.decoder import decoder_shape, decoder_sizes, no_experts, refuse_unless
from megastream.families.family import Family
from megastream.families.rows import ATTENTION, DENSE_MLP, QK_NORM, ends
from megastream.families.types import ModelShape

ROWS = (*ends(spares=False), *ATTENTION, *QK_NORM, *DENSE_MLP)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `Qwen3Config`. ValueError names a field that is missing or that no row is for."""
    refuse_unless("qwen3", config, attention_bias=False)
    number(config, "intermediate_size", least=1)
    return decoder_shape("qwen3", config)


FAMILY = Family(name="qwen3", rows=ROWS, read=read, sizes=decoder_sizes, is_moe=no_experts)
