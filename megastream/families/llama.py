"""Dense Llama (2, 3, 3.1 and later; not the mixture-of-experts ones, whose `model_type` is another).

Its vLLM names are read from vLLM 0.32's source; its own load was not compared.
"""

from __future__ import annotations

from megastream.families.config import number
from megastream.families.decoder import decoder_shape, decoder_sizes, no_experts, refuse_unless
from megastream.families.family import Family
from megastream.families.rows import ATTENTION, DENSE_MLP, ends
from megastream.families.types import ModelShape

ROWS = (*ends(spares=False), *ATTENTION, *DENSE_MLP)


def read(config: dict[str, object]) -> ModelShape:
    """Shape from the fields of `LlamaConfig`. ValueError names a field that is missing or that no row is for."""
    refuse_unless("llama", config, attention_bias=False, mlp_bias=False)
    number(config, "intermediate_size", least=1)
    return decoder_shape("llama", config)


FAMILY = Family(name="llama", rows=ROWS, read=read, sizes=decoder_sizes, is_moe=no_experts)
