"""Writes Megatron's distributed checkpoint: each key one box, under names that any of megatron's specs reads."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from megastream.convert.model import Model
from megastream.convert.torch_dist import BACKEND, INDEX, ONE_RANK, parts_of
from megastream.convert.torch_file import Archive, Slot, import_torch, lay_out_archive, pickled
from megastream.convert.types import ConvertError, Extent, Holding, NewFile, Target
from megastream.layout.mesh import Mesh
from megastream.layout.pack import row_major_strides
from megastream.layout.placing import Placed, window_shards
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec
from megastream.layout.synthetic import trainer_names
from megastream.layout.trainer import place_trainer_param

COMMON = "common.pt"
_CONTENT = {"content_metadata": {"singleton_local_shards": True}}
"""Tells megatron that layers and experts stand in the keys."""
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_ALIGNMENT = 64
_STATES_FILE = "__1_0.distcp"
_NO_STATE = [None]
"""What megatron saves as the extra state of a module that has none. It asks for one of every linear, and with
Transformer Engine of every norm and attention, so all of these point to this one."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A key with its tensor, what lies in it, and where it is in its file."""

    spec: TensorSpec
    shards: tuple[Shard, ...]
    tensors: tuple[TensorSpec, ...]
    file: str
    start: int
    archive: Archive


def plan_torch_dist(folder: Path, model: Model, dtypes: Mapping[str, str], max_file_bytes: int) -> Target:
    """A checkpoint of the weights alone. ConvertError without torch, or for a parameter whose parts differ in dtype."""
    import_torch()
    items = list(_items(model, dtypes, max_file_bytes))
    tensors = {spec.name: spec for item in items for spec in item.tensors}
    layout = RankLayout(
        side="engine",
        rank=0,
        world_size=1,
        coords={"pp": 0, "ep": 0},
        tensors=tuple(tensors.values()),
        buffers=tuple(BufferSpec(i.spec.name, prod(i.spec.shape), i.spec.dtype) for i in items),
        shards=tuple(shard for item in items for shard in item.shards),
    )
    extents = {(0, item.spec.name): Extent(item.file, item.archive.starts[0]) for item in items}
    files: dict[str, list[_Item]] = {}
    for item in items:
        files.setdefault(item.file, []).append(item)
    new = []
    for name, held in files.items():
        fixed = tuple(part for item in held for part in item.archive.fixed)
        new.append(NewFile(name, held[-1].start + held[-1].archive.num_bytes, fixed))
    nothing = lay_out_archive(pickled(_NO_STATE), [])
    new.append(NewFile(_STATES_FILE, nothing.num_bytes, nothing.fixed))
    index = _index(items, nothing.num_bytes)
    last = (COMMON, _saved(_CONTENT)), (BACKEND, json.dumps(_BACKENDS).encode()), (INDEX, index)
    return Target(Holding("torch_dist", folder, (layout,), extents), tuple(new), last)


def one_dtype(parameter: str, placed: Placed, dtypes: Mapping[str, str]) -> str:
    """Of all that a parameter fuses. ConvertError when they are several."""
    found = sorted({dtypes[region.tensor.name] for region in placed.regions})
    if len(found) != 1:
        raise ConvertError(f"{parameter} would hold {' and '.join(found)}; a parameter has one type")
    return found[0]


def _items(model: Model, dtypes: Mapping[str, str], max_file_bytes: int) -> Iterator[_Item]:
    number, at = 0, 0
    for parameter in trainer_names(model.family, model.shape, Mesh(), ONE_RANK):
        entry = model.family.trainer_entry(parameter, model.shape)
        placed = place_trainer_param(entry, ONE_RANK, model.shape.vocab if entry.rule == "vocab" else 0)
        dtype = one_dtype(parameter, placed, dtypes)
        for key, box in parts_of(parameter, placed, entry.rule, model):
            spec = TensorSpec(key, box.shape, dtype)
            archive = lay_out_archive(pickled(Slot(0, spec)), [spec], at)
            if at and at + archive.num_bytes > max_file_bytes:
                number, at = number + 1, 0
                archive = lay_out_archive(pickled(Slot(0, spec)), [spec], at)
            parts = list(window_shards(placed, box, row_major_strides(box.shape), rank=0, buffer=key))
            shards, held = tuple(shard for _, shard in parts), tuple(tensor for tensor, _ in parts)
            yield _Item(spec, shards, held, f"__0_{number}.distcp", at, archive)
            at += -(-archive.num_bytes // _ALIGNMENT) * _ALIGNMENT


def _saved(tree: Any) -> bytes:
    stream = io.BytesIO()
    import_torch().save(tree, stream)
    return stream.getvalue()


def _states(items: list[_Item]) -> list[str]:
    """Keys of the extra states of all modules, as megatron's sharded objects are called."""
    inside = [item.spec.name for item in items if item.spec.name.startswith(("decoder.", "mtp."))]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in inside)
    attentions = dict.fromkeys(
        f"{name.partition('.self_attention.')[0]}.self_attention.core_attention"
        for name in inside
        if ".self_attention." in name
    )
    return [f"{module}._extra_state/shard_0_1" for module in modules | attentions]


def _index(items: list[_Item], state_bytes: int) -> bytes:
    """torch's own index, as its own objects."""
    torch = import_torch()
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {key: BytesStorageMetadata() for key in _states(items)}
    places = {MetadataIndex(key): _StorageInfo(_STATES_FILE, 0, state_bytes) for key in described}
    for item in items:
        zero, size = torch.Size([0] * len(item.spec.shape)), torch.Size(item.spec.shape)
        described[item.spec.name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, item.spec.dtype)),
            size=size,
            chunks=[ChunkStorageMetadata(offsets=zero, sizes=size)],
        )
        index = MetadataIndex(item.spec.name, zero, 0)
        places[index] = _StorageInfo(item.file, item.start, item.archive.num_bytes)
    return pickle.dumps(Metadata(state_dict_metadata=described, storage_data=places))
