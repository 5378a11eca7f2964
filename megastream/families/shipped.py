"""Models that `megastream plan` knows by name: their config.json, from the places that `sources` in each file names."""

from __future__ import annotations

import json
from importlib.resources import files
from math import prod
from typing import Any

from megastream.families import family_of, load_shape
from megastream.families.types import ModelShape

_FOLDER = files("megastream.families") / "models"


def shipped_models() -> tuple[str, ...]:
    """Names, sorted."""
    names = (entry.name.removesuffix(".json") for entry in _FOLDER.iterdir() if entry.name.endswith(".json"))
    return tuple(sorted(names))


def shipped(name: str) -> dict[str, Any]:
    """A model's file: `config`, `sources`, and `parameters` as published. ValueError names the models there are."""
    if name not in shipped_models():
        raise ValueError(f"no model {name}: neither a file nor one of {', '.join(shipped_models())}")
    entry: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return entry


def num_parameters(shape: ModelShape) -> int:
    """Elements of all tensors that a plan of this model has."""
    return sum(prod(spec.shape) for spec in family_of(shape).tensors(shape))


def shape_of_model(name: str) -> ModelShape:
    """The shape of a shipped model."""
    return load_shape(shipped(name)["config"])
