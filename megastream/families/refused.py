"""What a config.json asks for that is not streamed: named before anybody wonders where it went."""

from __future__ import annotations

from dataclasses import dataclass

from megastream.families import family_of
from megastream.families.contract import FP8_BLOCKS, fp8_blocks
from megastream.families.types import ModelShape


@dataclass(frozen=True, slots=True)
class Refused:
    """Tensors, as a pattern of Hugging Face names, that a plan leaves out, and why."""

    tensors: str
    why: str


def refused(shape: ModelShape) -> tuple[Refused, ...]:
    """What the model has and a plan of it does not."""
    found = []
    if num := _number(shape, "num_nextn_predict_layers"):
        first = shape.num_layers
        layers = f"{first}" if num == 1 else f"{{{first}..{first + num - 1}}}"
        found.append(
            Refused(
                f"model.layers.{layers}.*",
                f"num_nextn_predict_layers is {num}: multi-token prediction can be trained, but is not streamed; an "
                "engine with a draft model is refused",
            )
        )
    if why := family_of(shape).trainer_differs:
        found.append(Refused("*", f"bytes are counted, but a Megatron trainer of this family is refused: {why}"))
    if shape.raw.get("quantization_config"):
        files = f"; `megastream convert --dtype {FP8_BLOCKS}` writes files for them" if fp8_blocks(shape) else ""
        found.append(
            Refused(
                "*.weight_scale_inv, *_blocks, *_scales",
                f"quantization_config: weights travel and are served as {shape.dtype}; quantized engines are refused"
                + files,
            )
        )
    return tuple(found)


def _number(shape: ModelShape, key: str) -> int:
    value = shape.raw.get(key) or 0
    return value if isinstance(value, int) else 0
