"""The safetensors files of a Hugging Face checkpoint: boxes of tensors, read as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megastream.layout.shard import Shard

_DTYPES = ("BF16", "F16", "F32")
"""Whose numbers are the weights, in safetensors' words. What is quantized needs scales, from tensors of their own."""


class HuggingFaceFiles:
    """Reads boxes of tensors from all safetensors files of a folder."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{folder} holds no *.safetensors file; give the folder of a Hugging Face checkpoint")
        self._folder, self._paths = folder, paths
        self._files: list[Any] = []
        self._where: dict[str, Any] = {}

    def __enter__(self) -> HuggingFaceFiles:
        for path in self._paths:
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read ({error}); copy or download it again") from error
            self._files.append(file)
            self._where |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *error: Any) -> None:
        for file in self._files:
            file.__exit__(*error)

    def read(self, shard: Shard) -> torch.Tensor:
        if shard.tensor not in self._where:
            raise ValueError(f"{self._folder} has no tensor {shard.tensor}, which rank {shard.rank} trains")
        piece = self._where[shard.tensor].get_slice(shard.tensor)
        if (dtype := piece.get_dtype()) not in _DTYPES:
            raise ValueError(
                f"{shard.tensor} in {self._folder} has dtype {dtype}, and only {', '.join(_DTYPES)} are loaded; "
                f"convert the checkpoint to one of them first, with its scales if it is quantized"
            )
        box, shape = shard.box, tuple(piece.get_shape())
        if len(shape) != len(box.hi) or any(high > size for high, size in zip(box.hi, shape, strict=True)):
            raise ValueError(f"{shard.tensor} in {self._folder} has shape {shape}; the model needs up to {box.hi}")
        region: torch.Tensor = piece[tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))]
        return region
