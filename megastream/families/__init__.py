"""Model families. A new one is a file with a table, and one line in FAMILIES."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megastream.families import (
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    llama,
    mixtral,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
)
from megastream.families.bounds import check_shape
from megastream.families.family import Family
from megastream.families.types import ModelShape, Place, Row, Source

__all__ = ["FAMILIES", "Family", "ModelShape", "Place", "Row", "Source", "family_of", "load_shape"]

FAMILIES: dict[str, Family] = {
    "deepseek_v2": deepseek_v2.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "llama": llama.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3_next": qwen3_next.FAMILY,
}

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Other values of `model_type` for the same model."""


def load_shape(config: dict[str, Any] | Path) -> ModelShape:
    """Shape of a model from its config.json (as a dict, the file, or the folder that holds it).

    ValueError names an unknown `model_type` and the known ones, the field that cannot be read or does not fit, or the
    file that is no JSON.
    """
    if isinstance(config, Path):
        path = config / "config.json" if config.is_dir() else config
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except RecursionError as error:
            raise ValueError(f"{path} is nested too deeply for a config.json") from error
        except ValueError as error:
            raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"config.json holds a {type(config).__name__}; expected an object")
    name = str(config.get("model_type"))
    return check_shape(_family(ALIASES.get(name, name)).read(config))


def family_of(shape: ModelShape) -> Family:
    """The table of a shape's family. ValueError names an unknown family and the known ones."""
    return _family(shape.family)


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"model family {name} has no table; known families: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]
