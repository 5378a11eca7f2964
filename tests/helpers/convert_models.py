"""Small random models in Hugging Face's form, for conversions: numpy, safetensors' own writer and torch's only."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megastream.convert.forms import Options
from megastream.convert.model import find_model
from megastream.convert.run import convert, verify
from megastream.families import family_of, load_shape
from tests.helpers.tiny import BIAS, hf_config, hf_shapes, tiny_config, tiny_glm4, tiny_qwen2

MODELS: dict[str, Callable[..., Any]] = {"qwen3_moe": tiny_config, "qwen2_moe": tiny_qwen2, "glm4_moe": tiny_glm4}


def write_hf(folder: Path, family: str = "qwen3_moe", *, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Path:
    """config.json, model.safetensors and a file of the tokenizer; every element of the model differs from others."""
    config = MODELS[family](**sizes)
    tensors = {
        name: random_tensor(name, shape, torch.float32 if name.endswith(BIAS) else dtype)
        for name, shape in hf_shapes(config).items()
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(config) | {"torch_dtype": str(dtype)[6:]}, indent=1))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_family(folder: Path, name: str, **changes: Any) -> Path:
    """The small model of any family: random bf16, and fp32 where the family's files are so."""
    from tests.helpers.family_models import FAMILY_MODELS

    config = {**FAMILY_MODELS[name].config(name), "torch_dtype": "bfloat16", **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = find_model(folder, None)
    specs = map(model.in_file, model.tensors().values())
    tensors = {spec.name: random_tensor(spec.name, spec.shape, getattr(torch, spec.dtype)) for spec in specs}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, by safetensors' own reader."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def converted(source: Path, target: Path, to: str = "hf", **options: Any) -> Path:
    convert(source, target, Options(to=to, **options), lambda done, total: None)
    return target


def difference(one: Path, other: Path, **options: Any) -> str | None:
    """What `verify` says of two folders; None when they are equal."""
    found = verify(one, other, Options(**options), lambda done, total: None).difference
    return None if found is None else str(found)


def names_of(folder: Path) -> list[str]:
    shape = load_shape(folder)
    return [spec.name for spec in family_of(shape).tensors(shape)]
