"""Hugging Face's form: safetensors files, more than one of them with an index that says which tensor is where.

A weight in fp8 has its scales in a tensor of their own: a buffer beside its own, whose name tells it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from megastream.convert.dtypes import FP8
from megastream.convert.fp8 import scale_name, scale_shape
from megastream.convert.model import Model
from megastream.convert.safetensors_file import Stored, grouped, layout_file, num_bytes, read_header
from megastream.convert.types import ConvertError, Extent, Holding, NewFile, Target
from megastream.layout.box import Box
from megastream.layout.naming import Kind
from megastream.layout.pack import row_major_strides
from megastream.layout.shard import BufferSpec, RankLayout, Shard, Side, TensorSpec

INDEX = "model.safetensors.index.json"
_COORDS = {"pp": 0, "ep": 0}


def read_hf(folder: Path, model: Model) -> Holding:
    """Where every tensor of the folder lies. What is stored again under another name is a second holder; layers for
    speculative decoding that have names of their own are left out.

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
    drafts = [name for name in found if name.startswith(model.family.drafts)]
    found = {name: place for name, place in found.items() if name not in drafts}
    own: dict[str, TensorSpec] = {}
    again: dict[str, TensorSpec] = {}
    tensors = model.tensors()
    scales, copies = _scales(folder, found, tensors), _copies(model, tensors)
    for name, (file, entry) in found.items():
        spec = tensors.get(name) or tensors.get(copies.get(name, "")) or scales.get(name)
        if spec is None:
            raise ConvertError(f"{folder / file}: {name} is no tensor of this {model.family.name}; see its config.json")
        if entry.shape != (expected := spec.shape if name in scales else model.in_file(spec).shape):
            raise ConvertError(f"{folder / file}: {name} has shape {entry.shape}, config.json says {expected}")
        (own if spec.name == name else again)[name] = TensorSpec(spec.name, spec.shape, entry.dtype)
    holders = [own, again] if again else [own]
    return Holding(
        form="hf",
        folder=folder,
        layouts=tuple(_layout(rank, held, world_size=len(holders)) for rank, held in enumerate(holders)),
        extents={(int(name in again), name): Extent(file, entry.start) for name, (file, entry) in found.items()},
        left_out=tuple(sorted({*drafts, *(path.name for path in folder.glob("*.safetensors"))} - files.keys())),
    )


def plan_hf(folder: Path, model: Model, dtypes: Mapping[str, str], max_file_bytes: int, *, fp8: bool = False) -> Target:
    """Files of at most `max_file_bytes` (one tensor at least), in the model's order, as transformers names them.

    `fp8`: the weights of linears are written in fp8, and their scales behind them.
    """
    specs = [TensorSpec(spec.name, spec.shape, dtypes[spec.name]) for spec in model.tensors().values()]
    stored: list[TensorSpec] = []
    for spec in map(model.in_file, specs):
        stored += _in_fp8(spec) if fp8 and model.family.is_linear(spec.name) else [spec]
    groups = grouped(stored, max_file_bytes)
    files: list[NewFile] = []
    extents: dict[tuple[int, str], Extent] = {}
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else "model.safetensors"
        file, starts = layout_file(name, group)
        files.append(file)
        extents |= {(0, tensor): Extent(name, start) for tensor, start in starts.items()}
        weight_map |= dict.fromkeys(sorted(starts), name)
    index = {"metadata": {"total_size": sum(map(num_bytes, stored))}, "weight_map": dict(sorted(weight_map.items()))}
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


def _scales(
    folder: Path, found: Mapping[str, tuple[str, Stored]], tensors: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """The scales of what is stored in fp8. ConvertError names a weight that has none, or none that is known."""
    scales: dict[str, TensorSpec] = {}
    for weight, (file, entry) in found.items():
        if entry.dtype != FP8 or weight not in tensors:
            continue
        name, shape = scale_name(weight), tensors[weight].shape
        if name not in found or found[name][1].dtype != "float32" or len(shape) != 2:
            raise ConvertError(
                f"{folder / file}: {weight} of shape {shape} is {FP8} and needs {name} of shape {scale_shape(shape)}, "
                "float32, one for each 128 x 128; other ways to quantize are not read"
            )
        scales[name] = TensorSpec(name, scale_shape(shape), "float32")
    return scales


def _in_fp8(spec: TensorSpec) -> list[TensorSpec]:
    return [
        TensorSpec(spec.name, spec.shape, FP8),
        TensorSpec(scale_name(spec.name), scale_shape(spec.shape), "float32"),
    ]


def _copies(model: Model, tensors: Iterable[str]) -> dict[str, str]:
    """The tensors that files may hold again, by the names of these copies: a head that is tied, and embedding and head
    inside layers of multi-token prediction, which have none of their own."""
    outer: dict[Kind, str] = {}
    for name in tensors:  # those outside the layers come first
        place = model.family.place(name)
        if place.layer is not None:
            break
        outer[place.kind] = name
    shape, embedding, copies = model.shape, outer["embed"], {}
    head = outer.get("head", embedding)
    if shape.tied:
        copies[model.family.outer_names("engine", shape)["head"]] = embedding
    for layer in range(shape.num_layers, shape.num_layers + shape.mtp_layers):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = embedding
        copies[f"model.layers.{layer}.shared_head.head.weight"] = head
    return copies


def _layout(rank: int, held: Mapping[str, TensorSpec], *, world_size: int, side: Side = "trainer") -> RankLayout:
    """Whole tensors, each a buffer of its own under the name that it has in the files."""
    return RankLayout(
        side=side,
        rank=rank,
        world_size=world_size,
        coords=_COORDS,
        tensors=tuple({spec.name: spec for spec in held.values()}.values()),
        buffers=tuple(BufferSpec(name, prod(spec.shape), spec.dtype) for name, spec in held.items()),
        shards=tuple(
            Shard(spec.name, Box.full(spec.shape), rank, name, 0, row_major_strides(spec.shape))
            for name, spec in held.items()
        ),
    )
