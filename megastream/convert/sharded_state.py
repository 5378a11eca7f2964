"""vLLM's `sharded_state`: safetensors files of each rank's live parameters, as its weight loader lays them out.

A module that hangs in two places of the model has two names, and vLLM saves and asks for the one that sorts first,
which is not always the one that our tables know. Its attention has four scales besides, which are 1 unless its cache is
quantized: it asks for them, and they are no weights.

vLLM processes parameters after it has loaded them, so what we write is what it holds before that. A model whose kernels
pack their weights (experts on a CPU) saves something else; such files are refused by their shapes. Which experts a rank
has no file says: they are placed linearly here, and nothing else is written or read.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megastream.convert.model import Model
from megastream.convert.safetensors_file import Stored, grouped, layout_file, read_header
from megastream.convert.types import ConvertError, Extent, Holding, NewFile, Target
from megastream.layout.engine import EngineParam, engine_rank_layout
from megastream.layout.expert_slots import local_experts
from megastream.layout.mesh import Mesh, engine_coords, engine_stage_layers, parse_engine_mesh
from megastream.layout.shard import RankLayout, TensorSpec
from megastream.layout.synthetic import engine_params

FILE = re.compile(r"model-(?:rank-(?P<rank>\d+)|pp-(?P<pp>\d+)-tp-(?P<tp>\d+))-part-\d+\.safetensors")
"""vLLM's names: without and with pipeline stages."""

_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
_ONE = struct.pack("<f", 1.0)

_Files = dict[tuple[int, int], dict[str, tuple[str, Stored]]]
"""(pp rank, tp rank) -> parameter -> its file, and where it lies there."""


def read_sharded_state(folder: Path, model: Model, layout: str | None) -> Holding:
    """Where every weight lies. Experts are where vLLM's linear placement puts them.

    Sizes are told by the names of the files, expert parallelism by how many experts a rank holds; `layout`, if given,
    must be the same. ConvertError names the file and the parameter that do not fit.
    """
    files = _read(folder, model)
    mesh = _mesh(folder, files, model, layout)
    layouts: list[RankLayout] = []
    extents: dict[tuple[int, str], Extent] = {}
    for rank in range(mesh.world_size):
        coords = engine_coords(mesh, rank)
        held = files[coords["pp"], coords["tp"]]
        experts = local_experts(model.shape.num_experts, mesh.ep, coords["ep"])
        params = [
            EngineParam(name, stored.shape, stored.dtype, _slots(folder / file, name, stored, experts, model))
            for name, (file, stored) in held.items()
        ]
        layouts.append(_layout(folder, rank, mesh, coords, params, model))
        extents |= {(rank, name): Extent(file, stored.start) for name, (file, stored) in held.items()}
    return Holding("sharded_state", folder, tuple(layouts), extents)


def plan_sharded_state(
    folder: Path, model: Model, dtypes: Mapping[str, str], layout: str, max_file_bytes: int
) -> Target:
    """What every rank of this layout loads. ConvertError for a layout that model, vLLM or files cannot have."""
    mesh = _parse(layout)
    if mesh.dp > 1:
        raise ConvertError(
            f"layout {mesh}: vLLM names files of sharded_state by pipeline and tensor rank alone, so dp={mesh.dp} "
            "ranks would share each; leave dp out, or take --to hf, from which engines of any layout start"
        )
    layouts: list[RankLayout] = []
    extents: dict[tuple[int, str], Extent] = {}
    new: list[NewFile] = []
    for rank in range(mesh.world_size):
        coords = engine_coords(mesh, rank)
        try:
            params, _ = engine_params(model.family, model.shape, mesh, coords)
        except ValueError as error:
            raise ConvertError(f"layout {mesh}: {error}") from error
        params = [replace(param, dtype=_dtype(param, model, dtypes)) for param in _tied(params, model, coords, mesh)]
        layouts.append(_layout(folder, rank, mesh, coords, params, model))
        stored = {model.family.state_name(param.name): param for param in params}
        specs = [TensorSpec(name, param.shape, param.dtype) for name, param in stored.items()]
        specs += [TensorSpec(name, (), "float32") for name in scales(model, mesh, coords["pp"])]
        for part, group in enumerate(grouped(specs, max_file_bytes)):
            place = f"pp-{coords['pp']}-tp-{coords['tp']}" if mesh.pp > 1 else f"rank-{coords['tp']}"
            file, starts = layout_file(f"model-{place}-part-{part}.safetensors", group)
            ones = tuple((start, _ONE) for name, start in starts.items() if name not in stored)
            new.append(replace(file, fixed=(*file.fixed, *ones)))
            extents |= {
                (rank, stored[name].name): Extent(file.name, start) for name, start in starts.items() if name in stored
            }
    return Target(Holding("sharded_state", folder, tuple(layouts), extents), tuple(new))


def scales(model: Model, mesh: Mesh, stage: int) -> list[str]:
    """Names of the attention's scales on a pipeline stage."""
    stage_layers = engine_stage_layers(mesh, model.shape.num_layers, stage)
    layers = [layer for layer in stage_layers if not model.family.has_delta(model.shape, layer)]
    return [f"model.layers.{layer}.{model.family.attention}.{name}" for layer in layers for name in _SCALES]


def _read(folder: Path, model: Model) -> _Files:
    files: _Files = {}
    for path in sorted(folder.glob("model-*-part-*.safetensors")):
        match = FILE.fullmatch(path.name)
        if match is None:
            raise ConvertError(f"{path} has no name of vLLM's; move it away")
        pp, tp = int(match["pp"] or 0), int(match["rank"] or match["tp"] or 0)
        held = files.setdefault((pp, tp), {})
        for state_name, stored in read_header(path).items():
            if state_name.rpartition(".")[2] in _SCALES:
                _check_scale(path, state_name, stored)
                continue
            name = model.family.engine_name(state_name)
            if name in held:
                raise ConvertError(f"{folder}: {name} is in {held[name][0]} and in {path.name}; keep one of the files")
            held[name] = path.name, stored
    return files


def _check_scale(path: Path, name: str, stored: Stored) -> None:
    with path.open("rb") as file:
        file.seek(stored.start)
        value = file.read(len(_ONE))
    if (stored.dtype, stored.shape, value) != ("float32", (), _ONE):
        raise ConvertError(f"{path}: {name} is not 1; scales of a quantized cache are not converted")


def _mesh(folder: Path, files: _Files, model: Model, layout: str | None) -> Mesh:
    pp, tp = (max(rank[axis] for rank in files) + 1 for axis in (0, 1))
    lacking = [(p, t) for p in range(pp) for t in range(tp) if (p, t) not in files]
    if lacking:
        raise ConvertError(f"{folder} has no file of pipeline rank {lacking[0][0]}, tensor rank {lacking[0][1]}")
    stacked = [
        (file, name, stored.shape[0])
        for held in files.values()
        for name, (file, stored) in held.items()
        if _stacks(folder / file, name, model)
    ]
    parted = bool(stacked) and tp > 1 and stacked[0][2] < model.shape.num_experts
    found = Mesh(tp=tp, etp=1 if parted else tp, ep=tp if parted else 1, pp=pp)
    if layout is not None and replace(_parse(layout), stages=None) != found:
        raise ConvertError(f"{folder} was written under {found}, not under {layout}; leave the layout out")
    return found


def _slots(path: Path, name: str, stored: Stored, experts: tuple[int, ...], model: Model) -> tuple[int, ...] | None:
    """The expert in each slot of a parameter that stacks them."""
    if not _stacks(path, name, model):
        return None
    if stored.shape[0] != len(experts):
        raise ConvertError(
            f"{path}: {name} has {stored.shape[0]} slots, and its rank has {len(experts)} of {model.shape.num_experts} "
            "experts when they are placed linearly; no file says which expert lies where, so those of an engine that "
            "has some of them twice, or elsewhere (EPLB), are not converted; save one that places them linearly"
        )
    return experts


def _stacks(path: Path, name: str, model: Model) -> bool:
    try:
        return model.family.engine_stacks_experts(name)
    except ValueError as error:
        raise ConvertError(f"{path}: {error}") from error


def _tied(params: Sequence[EngineParam], model: Model, coords: Mapping[str, int], mesh: Mesh) -> list[EngineParam]:
    """Where vLLM ties the head to the embedding, its state has the one parameter under the first of their names."""
    names = model.family.outer_names("engine", model.shape)
    has_head = coords["pp"] == mesh.pp - 1 or "head" in model.family.engine_spares()
    if not model.shape.tied or not has_head:
        return list(params)
    pair = sorted((names["embed"], names["head"]))
    both = [param for param in params if param.name in pair]
    return [replace(both[0], name=pair[0]), *(param for param in params if param.name not in pair)]


def _dtype(param: EngineParam, model: Model, dtypes: Mapping[str, str]) -> str:
    family, shape = model.family, model.shape
    slots: Sequence[int | None] = param.experts if param.experts is not None else (None,)
    tensors = [spec for slot in slots for spec in family.engine_entry(param.name, shape, slot).tensors]
    found = sorted({dtypes[spec.name] for spec in tensors})
    if len(found) != 1:
        raise ConvertError(f"{param.name} would hold {' and '.join(found)}; a parameter has one type")
    return found[0]


def _layout(
    folder: Path, rank: int, mesh: Mesh, coords: dict[str, int], params: Sequence[EngineParam], model: Model
) -> RankLayout:
    """Nothing counts as unused here: vLLM loads, and saves, also what no step of a rank reads."""
    try:
        return engine_rank_layout(
            model.family, model.shape, rank=rank, world_size=mesh.world_size, coords=coords, params=params
        )
    except ValueError as error:
        raise ConvertError(f"{folder}: {error}") from error


def _parse(text: str) -> Mesh:
    try:
        mesh = parse_engine_mesh(text)
    except ValueError as error:
        raise ConvertError(str(error)) from error
    if mesh.placement != "linear":
        raise ConvertError(
            f"layout {mesh}: no file of sharded_state says which expert lies where, so they are placed linearly; leave "
            f"{mesh.placement} out, or take --to hf, from which engines of any placement start"
        )
    return mesh
