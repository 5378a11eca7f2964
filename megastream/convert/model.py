"""The model that files belong to: its config.json, its family, and the small files that go with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from megastream.convert.fp8 import QUANTIZATION
from megastream.convert.types import ConvertError, Dtype
from megastream.families import Family, ModelShape, family_of, load_shape
from megastream.families.config import number
from megastream.layout.shard import TensorSpec

CONFIG = "config.json"
_QUANTIZATION = "quantization_config"
_MTP_LAYERS = "num_nextn_predict_layers"
_DTYPES = ("dtype", "torch_dtype")
"""Where config.json says the type of weights, in newer and in older ones."""
_SUFFIXES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}
_NOT_OURS = {"metadata.json", "manifest.json", "versions.json"}
"""JSON files of Megatron's and megastream's checkpoints, which say something about the files beside them."""
_MAX_SIDE_FILE_BYTES = 1 << 28


@dataclass(frozen=True)
class Model:
    """Family and shape, and the config.json that they come from."""

    family: Family
    shape: ModelShape
    config: Path

    def tensors(self) -> dict[str, TensorSpec]:
        """Every weight of the model under its Hugging Face name."""
        return {spec.name: spec for spec in self.family.tensors(self.shape)}

    def in_file(self, spec: TensorSpec) -> TensorSpec:
        """The same elements in the shape that a Hugging Face file gives them; see `Family.file_shape`."""
        return structs.replace(spec, shape=self.family.file_shape(spec.name, self.shape))

    def side_files(self) -> dict[str, Path]:
        """config.json, tokenizer and the like: what a folder of weights needs beside them, whatever its form.

        A configuration of another name stands for itself alone: what lies beside it need not belong to it.
        """
        if self.config.name != CONFIG:
            return {CONFIG: self.config}
        return {path.name: path for path in sorted(self.config.parent.iterdir()) if _is_side_file(path)}

    def config_json(self, dtype: Dtype | Literal["float32"] | None) -> bytes:
        """config.json beside weights that became `dtype`, or whose types stayed what they were.

        It is the model's own but for what it says of that type and of quantization. Engines and transformers quantize
        every linear that is not named there, so all modules are whose matrix stays as it is.
        """
        data = self.config.read_bytes()
        config: dict[str, Any] = json.loads(data)
        before = dict(config)
        config.pop(_QUANTIZATION, None)
        if dtype in ("bfloat16", "float32"):
            config |= dict.fromkeys([key for key in _DTYPES if key in config] or _DTYPES[1:], dtype)
        if dtype == "fp8-block128":
            kept = [s.name for s in self.tensors().values() if len(s.shape) == 2 and not self.family.is_linear(s.name)]
            kept.append(self.family.outer_names("engine", self.shape)["head"])  # also where it is tied, and no tensor
            modules = sorted({name.removesuffix(".weight") for name in kept})
            config[_QUANTIZATION] = {**QUANTIZATION, "modules_to_not_convert": modules}
        return data if config == before else (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def find_model(weights: Path, config: Path | None) -> Model:
    """The model of a folder of weights: of `config` (a config.json or its folder), else of the config.json beside them.

    Its layers of multi-token prediction are those that config.json declares, where the family's table has them; whether
    files have them is another matter (`mtp.as_held`). ConvertError when there is none, or when it cannot be read.
    """
    path = config or weights
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise ConvertError(f"{path} does not exist; name the model's config.json with --config")
    try:
        shape = load_shape(path)
        family = family_of(shape)
        declared = number(shape.raw, _MTP_LAYERS, 0) if family.has_mtp else 0
    except OSError as error:
        raise ConvertError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConvertError(f"{path}: {error}") from error
    return Model(family, replace(shape, mtp_layers=declared), path)


def _is_side_file(path: Path) -> bool:
    fits = path.suffix in _SUFFIXES and path.name not in _NOT_OURS and not path.name.endswith(".safetensors.index.json")
    return fits and not path.name.startswith(".") and path.is_file() and path.stat().st_size <= _MAX_SIDE_FILE_BYTES
