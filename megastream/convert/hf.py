"""Hugging Face's form: safetensors files, more than one of them with an index that says which tensor is where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

from megastream.convert.model import Model
from megastream.convert.safetensors_file import Stored, grouped, layout_file, num_bytes, read_header
from megastream.convert.types import ConvertError, Extent, Holding, NewFile, Target
from megastream.layout.box import Box
from megastream.layout.pack import row_major_strides
from megastream.layout.shard import BufferSpec, RankLayout, Shard, Side, TensorSpec

INDEX = "model.safetensors.index.json"
_COORDS = {"pp": 0, "ep": 0}


def read_hf(folder: Path, model: Model) -> Holding:
    """Where every tensor of the folder lies. A head that is tied, and stored all the same, is a second holder.

    ConvertError names file and tensor of whatever is missing, stored twice, of another shape or not the model's.
    """
    found: dict[str, tuple[str, Stored]] = {}
    files = _files(folder)
    for file, wanted in files.items():
        stored = read_header(folder / file)
        if wanted is not None and wanted != stored.keys():
            odd = sorted(wanted ^ stored.keys())[0]
            there, where = (INDEX, folder / file) if odd in wanted else (folder / file, INDEX)
            raise ConvertError(
                f"{folder}: {odd} is in {there}, not in {where}; the index belongs to other files, take all of one save"
            )
        for name, entry in stored.items():
            if name in found:
                raise ConvertError(f"{folder}: {name} is in {found[name][0]} and in {file}; keep one of the files")
            found[name] = file, entry
    own: dict[str, TensorSpec] = {}
    again: dict[str, TensorSpec] = {}
    tensors = model.tensors()
    for name, (file, entry) in found.items():
        spec = tensors.get(name) or tensors.get(_tied(model, name, tensors) or "")
        if spec is None:
            raise ConvertError(f"{folder / file}: {name} is no tensor of this {model.family.name}; see its config.json")
        if entry.shape != (expected := model.in_file(spec).shape):
            raise ConvertError(f"{folder / file}: {name} has shape {entry.shape}, config.json says {expected}")
        (own if spec.name == name else again)[name] = TensorSpec(spec.name, spec.shape, entry.dtype)
    holders = [own, again] if again else [own]
    return Holding(
        form="hf",
        folder=folder,
        layouts=tuple(_layout(rank, held, world_size=len(holders)) for rank, held in enumerate(holders)),
        extents={(int(name in again), name): Extent(file, entry.start) for name, (file, entry) in found.items()},
        left_out=tuple(sorted({path.name for path in folder.glob("*.safetensors")} - files.keys())),
    )


def plan_hf(folder: Path, model: Model, dtypes: Mapping[str, str], max_file_bytes: int) -> Target:
    """Files of at most `max_file_bytes` (one tensor at least), in the model's order, as transformers names them."""
    specs = [TensorSpec(spec.name, spec.shape, dtypes[spec.name]) for spec in model.tensors().values()]
    groups = grouped(specs, max_file_bytes)
    files: list[NewFile] = []
    extents: dict[tuple[int, str], Extent] = {}
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors"
        file, starts = layout_file(name, [model.in_file(spec) for spec in group])
        files.append(file)
        extents |= {(0, tensor): Extent(name, start) for tensor, start in starts.items()}
        weight_map |= dict.fromkeys(sorted(starts), name)
    index = {"metadata": {"total_size": sum(map(num_bytes, specs))}, "weight_map": dict(sorted(weight_map.items()))}
    return Target(
        Holding("hf", folder, (_layout(0, {spec.name: spec for spec in specs}, world_size=1, side="engine"),), extents),
        tuple(files),
        ((INDEX, (json.dumps(index, indent=2) + "\n").encode()),) if len(files) > 1 else (),
    )


def _files(folder: Path) -> dict[str, set[str] | None]:
    """Every file of weights, with the tensors that the index places there; None without an index."""
    if not (folder / INDEX).is_file():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise ConvertError(f"{folder} holds no *.safetensors file and no {INDEX}")
        return dict.fromkeys(names)
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        placed: dict[str, set[str]] = {}
        for tensor, file in weight_map.items():
            placed.setdefault(file, set()).add(tensor)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ConvertError(f"{folder / INDEX} cannot be read ({error!r}); fetch it again") from error
    for file in placed:
        if Path(file).name != file or not (folder / file).is_file():
            raise ConvertError(f"{folder / INDEX} names {file}, which is not there; fetch it, or the right index")
    return {file: placed[file] for file in sorted(placed)}


def _tied(model: Model, name: str, tensors: Mapping[str, TensorSpec]) -> str | None:
    """The embedding, when `name` is the head of a model in which both are one tensor."""
    if not model.shape.tied or name != model.family.outer_names("engine", model.shape)["head"]:
        return None
    return next(tensor for tensor in tensors if model.family.place(tensor).kind == "embed")


def _layout(rank: int, held: Mapping[str, TensorSpec], *, world_size: int, side: Side = "trainer") -> RankLayout:
    """Whole tensors, each a buffer of its own under the name that it has in the files."""
    return RankLayout(
        side=side,
        rank=rank,
        world_size=world_size,
        coords=_COORDS,
        tensors=tuple(held.values()),
        buffers=tuple(BufferSpec(name, prod(spec.shape), spec.dtype) for name, spec in held.items()),
        shards=tuple(
            Shard(spec.name, Box.full(spec.shape), rank, name, 0, row_major_strides(spec.shape))
            for name, spec in held.items()
        ),
    )
