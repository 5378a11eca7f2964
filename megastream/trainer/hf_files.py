"""The safetensors files of a Hugging Face checkpoint: boxes of tensors, read as they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megastream.families.family import Family
from megastream.families.types import ModelShape
from megastream.layout.box import Box
from megastream.layout.shard import Shard, TensorSpec

INDEX = "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32")
"""Whose numbers are the weights, in safetensors' words. What is quantized needs scales, from tensors of their own."""
_NONE: Mapping[str, str] = MappingProxyType({})


class HuggingFaceFiles:
    """Reads boxes of `tensors` from the files of a folder: those that its index names, else all *.safetensors.

    `tied`: tensor -> the name under which the files may hold it again; where they do, both must be equal. ValueError
    names file and tensor of whatever cannot be read, is missing, stored twice, quantized or of another shape.
    """

    def __init__(self, folder: Path, tensors: Iterable[TensorSpec], tied: Mapping[str, str] = _NONE) -> None:
        self._folder, self._tied = folder, tied
        self._shapes = {spec.name: spec.shape for spec in tensors}
        self._files: list[Any] = []
        self._where: dict[str, Any] = {}

    def __enter__(self) -> HuggingFaceFiles:
        holder: dict[str, str] = {}
        for name, wanted in self._names().items():
            file = self._open(name)
            names = set(file.keys())
            if wanted is not None and wanted != names:
                odd = sorted(wanted ^ names)[0]
                there, absent = (INDEX, name) if odd in wanted else (name, INDEX)
                raise ValueError(
                    f"{self._folder}: {odd} is in {there}, not in {absent}; the index belongs to other files, take all "
                    "of one save"
                )
            for tensor in sorted(names & holder.keys()):
                raise ValueError(
                    f"{self._folder}: {tensor} is in {holder[tensor]} and in {name}; keep one of the files"
                )
            holder |= dict.fromkeys(names, name)
            self._where |= dict.fromkeys(names, file)
        return self

    def __exit__(self, *error: Any) -> None:
        for file in self._files:
            file.__exit__(*error)

    def read(self, shard: Shard) -> torch.Tensor:
        if shard.tensor not in self._where:
            raise ValueError(f"{self._folder} has no tensor {shard.tensor}, which rank {shard.rank} trains")
        shape = self._shapes[shard.tensor]
        region = self._region(shard.tensor, shape, shard.box)
        again = self._tied.get(shard.tensor)
        if again is not None and again in self._where:
            self._check_equal(shard, region, again, self._region(again, shape, shard.box))
        return region

    def _names(self) -> dict[str, set[str] | None]:
        """Every file of weights, with the tensors that the index places there; None without an index."""
        path = self._folder / INDEX
        if not path.is_file():
            names = sorted(each.name for each in self._folder.glob("*.safetensors"))
            if not names:
                raise ValueError(
                    f"{self._folder} holds no *.safetensors file; give the folder of a Hugging Face checkpoint"
                )
            return dict.fromkeys(names)
        placed: dict[str, set[str]] = {}
        try:
            for tensor, file in json.loads(path.read_text(encoding="utf-8"))["weight_map"].items():
                placed.setdefault(file, set()).add(tensor)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error!r}); copy or download it again") from error
        for file in placed:
            if Path(file).name != file or not (self._folder / file).is_file():
                raise ValueError(f"{path} names {file}, which is not there; copy it too, or take the right index")
        return {file: placed[file] for file in sorted(placed)}

    def _open(self, name: str) -> Any:
        path = self._folder / name
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error}); copy or download it again") from error
        self._files.append(file)
        return file

    def _region(self, tensor: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        piece = self._where[tensor].get_slice(tensor)
        if (dtype := piece.get_dtype()) not in _DTYPES:
            raise ValueError(
                f"{tensor} in {self._folder} has dtype {dtype}, and only {', '.join(_DTYPES)} are loaded; "
                f"convert the checkpoint to one of them first, with its scales if it is quantized"
            )
        if (stored := tuple(piece.get_shape())) != shape:
            raise ValueError(
                f"{tensor} in {self._folder} has shape {stored}; the model needs {shape}: it is another model's"
            )
        region: torch.Tensor = piece[tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))]
        return region

    def _check_equal(self, shard: Shard, region: torch.Tensor, again: str, other: torch.Tensor) -> None:
        one, two = region.float(), other.float()
        unequal = (one != two) & ~(one.isnan() & two.isnan())
        if unequal.any():
            at = tuple(unequal.nonzero()[0].tolist())
            index = ", ".join(str(low + step) for low, step in zip(shard.box.lo, at, strict=True))
            raise ValueError(
                f"{self._folder}: {shard.tensor}[{index}] is {one[at].item():.9g} and {again}[{index}] is "
                f"{two[at].item():.9g}, but this model ties them; take the files of one save, or set "
                "tie_word_embeddings to false in config.json"
            )


def tied_names(family: Family, shape: ModelShape) -> dict[str, str]:
    """The embedding -> the head, where they are one tensor that a file may hold under both names."""
    if not shape.tied:
        return {}
    embed = family.trainer_entry(family.outer_names("trainer", shape)["embed"], shape).tensors[0].name
    return {embed: family.outer_names("engine", shape)["head"]}
