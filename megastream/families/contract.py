"""The type of every tensor on each side of a stream, and in the files that an engine in fp8 starts from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megastream.families.family import Family
from megastream.families.types import ModelShape

FP8_BLOCKS = "fp8-block128"
"""float8_e4m3fn, with a float32 scale for each block of 128 x 128."""

_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Typed:
    """Tensors, as a pattern of Hugging Face names (`*` for numbers), and their types."""

    tensors: str
    trainer: str
    engine: str


def contract(family: Family, shape: ModelShape) -> tuple[Typed, ...]:
    """One entry for each kind of tensor that the model has, in the order of its table.

    The engine's types are those that its files have where config.json says fp8 in blocks. They are not streamed to it:
    see `refused`.
    """
    in_fp8 = fp8_blocks(shape)
    found: dict[str, Typed] = {}
    for spec in family.tensors(shape):
        pattern = _NUMBER.sub(".*", spec.name)
        if pattern not in found:
            trainer, engine = family.dtypes(spec.name, shape)
            fp8 = in_fp8 and family.is_linear(spec.name)
            found[pattern] = Typed(pattern, trainer, FP8_BLOCKS if fp8 else engine)
    return tuple(found.values())


def fp8_blocks(shape: ModelShape) -> bool:
    """Whether config.json says that the model's files are as `megastream convert --dtype fp8-block128` writes them."""
    said = shape.raw.get("quantization_config")
    return isinstance(said, dict) and said.get("quant_method") == "fp8" and said.get("weight_block_size") == [128, 128]
