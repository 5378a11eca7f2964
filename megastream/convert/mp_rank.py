"""Megatron's per-rank checkpoint: `mp_rank_<tp>[_<pp>][_<ep>]/model_optim_rng.pt`, each rank's own parameters.

Layers and experts are numbered from 0 on every rank, so only the layout says which they are. The files say it
themselves when they hold megatron's `args`; ours do.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megastream.convert.grouped import is_grouped, with_grouped
from megastream.convert.inert_pickle import TensorRef
from megastream.convert.model import Model
from megastream.convert.mtp import canonical_name, megatron_name
from megastream.convert.torch_dist_write import one_dtype
from megastream.convert.torch_file import (
    Slot,
    TorchFile,
    import_torch,
    lay_out_archive,
    open_file,
    pickled,
    read_torch_file,
)
from megastream.convert.types import ConvertError, Extent, Holding, NewFile, Target
from megastream.layout.mesh import Mesh, parse_trainer_mesh, trainer_chunks, trainer_coords
from megastream.layout.pack import row_major_strides
from megastream.layout.shard import BufferSpec, RankLayout, TensorSpec
from megastream.layout.stages import uneven_stages
from megastream.layout.synthetic import MEGATRON_VOCAB_MULTIPLE, trainer_names
from megastream.layout.trainer import TrainerParam, place_trainer_param, trainer_rank_layout

WEIGHTS = "model_optim_rng.pt"
_ARGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_UNEVEN = {
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
    "embedding": "account_for_embedding_in_pipeline_split",
    "loss": "account_for_loss_in_pipeline_split",
}
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.linear_fc[12]\.weight)\d+$|(?<=\.linear_fc[12]\.bias)\d+$")


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank that saves: the first of those that hold the same."""

    number: int
    coords: dict[str, int]
    file: str


def read_mp_rank(folder: Path, model: Model, layout: str | None) -> Holding:
    """Where every weight lies. ConvertError names file and parameter of what does not fit the layout."""
    files = sorted(path.parent.name for path in folder.glob(f"mp_rank_*/{WEIGHTS}"))
    mesh = _parse(layout) if layout else _mesh_of(folder / files[0] / WEIGHTS, model.shape.num_layers)
    ranks = _ranks(mesh, model)
    if sorted(rank.file.partition("/")[0] for rank in ranks) != files:
        raise ConvertError(
            f"{folder} holds {len(files)} ranks ({', '.join(files[:3])}...), layout {mesh} has {len(ranks)} "
            f"({ranks[0].file}, ...); give the right one with --from-layout"
        )
    layouts, extents, left_out = [], {}, []
    for number, rank in enumerate(ranks):
        stored = _load(folder / rank.file)
        params: dict[str, TensorSpec] = {}
        for name, ref in _parameters(folder / rank.file, stored, rank, mesh, model):
            if name in params:
                raise ConvertError(
                    f"{folder / rank.file}: two parameters are {name}; layers or experts collide, save it again"
                )
            params[name] = TensorSpec(name, ref.shape, ref.storage.dtype)
            extents[number, name] = Extent(rank.file, stored.start(ref, f"{name} in {folder / rank.file}"))
        left_out += [f"{rank.file}: {key}" for key in stored.tree if not key.startswith("model")]
        layouts.append(_layout(number, len(ranks), rank.coords, params, model, folder / rank.file))
    grouped = sum(is_grouped(name) for _, name in extents)
    return Holding("mp_rank", folder, tuple(layouts), extents, tuple(left_out), grouped)


def plan_mp_rank(folder: Path, model: Model, dtypes: Mapping[str, str], layout: str) -> Target:
    """A file for each rank that holds something of its own. ConvertError for a layout that has no such files."""
    import_torch()
    mesh = _parse(layout)
    ranks, layouts, files = _ranks(mesh, model), [], []
    extents: dict[tuple[int, str], Extent] = {}
    for number, rank in enumerate(ranks):
        params = {}
        try:
            for name in trainer_names(model.family, model.shape, mesh, rank.coords):
                entry = model.family.trainer_entry(name, model.shape)
                multiple = MEGATRON_VOCAB_MULTIPLE * mesh.tp
                padded = -(-model.shape.vocab // multiple) * multiple if entry.rule == "vocab" else 0
                placed = place_trainer_param(entry, rank.coords, padded)
                dtype = one_dtype(name, placed, dtypes) if placed.regions else dtypes[entry.tensors[0].name]
                params[name] = TensorSpec(name, placed.shape, dtype)
        except ValueError as error:
            raise ConvertError(f"layout {mesh}: {error}") from error
        archive = lay_out_archive(pickled(_tree(params, rank.coords, mesh, model)), list(params.values()))
        files.append(NewFile(rank.file, archive.num_bytes, archive.fixed))
        starts = zip(params, archive.starts, strict=True)
        extents |= {(number, name): Extent(rank.file, start) for name, start in starts}
        layouts.append(_layout(number, len(ranks), rank.coords, params, model, folder / rank.file))
    return Target(Holding("mp_rank", folder, tuple(layouts), extents), tuple(files))


def _parse(text: str) -> Mesh:
    try:
        return parse_trainer_mesh(text)
    except ValueError as error:
        raise ConvertError(str(error)) from error


def _ranks(mesh: Mesh, model: Model) -> list[_Rank]:
    """Ranks by the name of their file, which tells tensor, pipeline and expert rank, but no expert tensor rank."""
    if model.shape.num_experts % mesh.ep:
        raise ConvertError(f"layout {mesh}: {model.shape.num_experts} experts do not divide by ep={mesh.ep}")
    found: dict[str, _Rank] = {}
    for number in range(mesh.world_size):
        coords = trainer_coords(mesh, number)
        name = f"mp_rank_{coords['tp']:02}" + (f"_{coords['pp']:03}" if mesh.pp > 1 else "")
        name += f"_{coords['ep']:03}" if mesh.ep > 1 else ""
        rank = found.setdefault(name, _Rank(number, coords, f"{name}/{WEIGHTS}"))
        if rank.coords["etp"] != coords["etp"]:
            raise ConvertError(
                f"layout {mesh}: ranks with different parts of an expert would share {name}; etp must divide tp"
            )
    return list(found.values())


def _load(path: Path) -> TorchFile:
    with open_file(path) as file:
        stored = read_torch_file(file, 0, path.stat().st_size, str(path))
    if not isinstance(stored.tree, dict) or not any(str(key).startswith("model") for key in stored.tree):
        raise ConvertError(f"{path} holds no `model`; name a checkpoint of Megatron")
    return stored


def _mesh_of(path: Path, num_layers: int) -> Mesh:
    """What megatron's `args` say. ConvertError when there are none, or of stages that we do not take."""
    args = _load(path).tree.get("args")
    sizes = {axis: getattr(args, name, None) for axis, name in _ARGS.items()}
    pp = sizes.pop("pp")
    if not (isinstance(pp, int) and isinstance(sizes["tp"], int)):
        raise ConvertError(f"{path} does not say its layout; give it with --from-layout")
    vpp = getattr(args, "virtual_pipeline_model_parallel_size", None)
    text = " ".join(f"{axis}{size}" for axis, size in sizes.items() if isinstance(size, int))
    text += f" pp{pp}" + _stages_of(path, args, num_layers, pp, vpp or 1)
    try:
        return parse_trainer_mesh(text + (f" vpp{vpp}" if isinstance(vpp, int) else ""))
    except ValueError as error:
        raise ConvertError(f"{path}: its args say {error}; give the right layout with --from-layout") from error


def _stages_of(path: Path, args: Any, num_layers: int, pp: int, vpp: int) -> str:
    """The layers of uneven stages, in the form of a layout string."""
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str):
        return f"({layout})"
    if layout is not None:
        raise ConvertError(f"{path}: its pipeline layout is no text; give the layers of each stage with --from-layout")
    uneven = {name: said for name, argument in _UNEVEN.items() if (said := getattr(args, argument, None))}
    if not uneven:
        return ""
    try:
        return "(" + ",".join(map(str, uneven_stages(num_layers, pp, vpp, **uneven))) + ")"
    except (ValueError, TypeError) as error:
        raise ConvertError(f"{path}: {error}; give the layers of each stage with --from-layout") from error


def _parameters(
    path: Path, stored: TorchFile, rank: _Rank, mesh: Mesh, model: Model
) -> Iterator[tuple[str, TensorRef]]:
    """Canonical names and tensors of a rank: layers and experts with their global numbers."""
    for chunk, layers in enumerate(_chunks(rank.coords, mesh, model)):
        key = f"model{chunk}" if mesh.vpp > 1 else "model"
        if not isinstance(stored.tree.get(key), dict):
            raise ConvertError(f"{path} has no `{key}`, which layout {mesh} needs; give the right --from-layout")
        for name, ref in stored.tree[key].items():
            if isinstance(ref, TensorRef) and not name.endswith("_extra_state"):
                if ref.strides != row_major_strides(ref.shape):
                    raise ConvertError(f"{path}: {name} is not stored row by row; save it again")
                yield _global(path, name, layers, rank.coords, model), ref


def _chunks(coords: Mapping[str, int], mesh: Mesh, model: Model) -> list[Sequence[int]]:
    """Global layers of each virtual stage of a rank."""
    try:
        return [*trainer_chunks(mesh, model.shape.num_layers, coords["pp"])]
    except ValueError as error:
        raise ConvertError(str(error)) from error


def _global(path: Path, name: str, layers: Sequence[int], coords: Mapping[str, int], model: Model) -> str:
    name = name.removeprefix("module.")
    if match := _LAYER.search(name):
        if int(match[0]) >= len(layers):
            raise ConvertError(f"{path}: {name} is beyond the {len(layers)} layers of this stage; is the layout right?")
        name = _LAYER.sub(str(layers[int(match[0])]), name, count=1)
    first = coords["ep"] * (model.shape.num_experts // coords["ep_size"])
    name = _EXPERT.sub(lambda match: str(first + int(match[0])), name, count=1)
    try:
        return canonical_name(name, model)
    except ConvertError as error:
        raise ConvertError(f"{path}: {error}") from error


def _local(name: str, layers: Sequence[int], coords: Mapping[str, int], model: Model) -> str:
    """The inverse of `_global`."""
    name = megatron_name(name, model)
    if match := _LAYER.search(name):
        name = _LAYER.sub(str(layers.index(int(match[0]))), name, count=1)
    first = coords["ep"] * (model.shape.num_experts // coords["ep_size"])
    return _EXPERT.sub(lambda match: str(int(match[0]) - first), name, count=1)


def _tree(params: Mapping[str, TensorSpec], coords: Mapping[str, int], mesh: Mesh, model: Model) -> dict[str, Any]:
    chunks = _chunks(coords, mesh, model)
    models: list[OrderedDict[str, Slot]] = [OrderedDict() for _ in chunks]
    for number, (name, spec) in enumerate(params.items()):
        chunk = _chunk_of(name, chunks, first=coords["pp"] == 0)
        models[chunk][_local(name, chunks[chunk], coords, model)] = Slot(number, spec)
    args = {name: getattr(mesh, axis) for axis, name in _ARGS.items()}
    args |= {"virtual_pipeline_model_parallel_size": mesh.vpp if mesh.vpp > 1 else None}
    args |= {"num_layers": model.shape.num_layers, "pipeline_model_parallel_layout": _letters(mesh, model)}
    args |= {"mtp_num_layers": model.shape.mtp_layers or None}
    tree: dict[str, Any] = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 0}
    return tree | {f"model{n}" if mesh.vpp > 1 else "model": held for n, held in enumerate(models)}


def _letters(mesh: Mesh, model: Model) -> str | None:
    """Uneven stages as megatron's own argument says them."""
    if mesh.stages is None:
        return None
    return f"E{'|'.join('t' * num for num in mesh.stages)}{'m' * model.shape.mtp_layers}L"


def _chunk_of(name: str, chunks: Sequence[Sequence[int]], *, first: bool) -> int:
    """The virtual stage of a parameter: by its layer, and the embedding of the first stage is in the first one.

    Everything else outside the decoder's layers is in the last: layers of multi-token prediction, an embedding that
    stands beside them, norm and head.
    """
    if match := _LAYER.search(name):
        layer = int(match[0])
        return next((number for number, layers in enumerate(chunks) if layer in layers), len(chunks) - 1)
    return 0 if first and name.startswith("embedding.") else len(chunks) - 1


def _layout(
    number: int, world_size: int, coords: Mapping[str, int], params: Mapping[str, TensorSpec], model: Model, path: Path
) -> RankLayout:
    plain = [spec for spec in params.values() if not is_grouped(spec.name)]
    grouped = [spec for spec in params.values() if is_grouped(spec.name)]
    try:
        layout = trainer_rank_layout(
            model.family,
            model.shape,
            rank=number,
            world_size=world_size,
            coords=coords,
            params=[TrainerParam(spec.name, spec.shape, spec.name, 0) for spec in plain],
            buffers=[BufferSpec(spec.name, prod(spec.shape), spec.dtype) for spec in plain],
        )
        return with_grouped(layout, grouped, coords, model) if grouped else layout
    except ValueError as error:
        raise ConvertError(f"{path}: {error}") from error
