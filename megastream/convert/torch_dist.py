"""Megatron's distributed checkpoint (`torch_dist`): a tensor for each key, cut into boxes that lie in `.distcp` files.

A key is a parameter as it would be without tensor parallelism, so the boxes need no layout. Keys come in two ways:
with the layer and the expert in the name (`singleton_local_shards`), which is what we write, or as leading dims. There
SequentialMLP and TEGroupedMLP save a box for each expert, GroupedMLP (megatron-core <= 0.16) one for all of a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from megastream.convert import inert_pickle
from megastream.convert.inert_pickle import Opaque, TensorRef
from megastream.convert.model import Model
from megastream.convert.mtp import canonical_name, megatron_name
from megastream.convert.torch_file import open_file, read_torch_file
from megastream.convert.types import ConvertError, Extent, Holding
from megastream.layout.box import Box
from megastream.layout.mesh import Mesh, trainer_coords
from megastream.layout.placing import Placed, window_shards
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec
from megastream.layout.trainer import place_trainer_param

INDEX = ".metadata"
BACKEND = "metadata.json"
ONE_RANK = trainer_coords(Mesh(), 0)
GATE, UP = "_w", "_v"
"""Behind the key of a fused gate and up: its halves, each a tensor of its own."""
_GATED = ("gated", "stack_gated")
"""Rules of such parameters."""

_NO_WEIGHT = re.compile(r"^(chained_\d+\.)?optimizer\.|^rng_state|^rerun_state_machine|_extra_state")
_MASTER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_)?param\.(.+)")
"""The fp32 master of the weight whose key stands behind it, where an optimizer's state is saved by parameters."""
_LOCAL_EXPERTS, _EXPERTS = ".mlp.experts.local_experts.", ".mlp.experts.experts."
"""In names of parameters, and in keys."""
_NO_EXPERT = re.compile(r"(?<=\.mlp\.experts\.experts\.)(?!\d)")
_NO_NUMBER = re.compile(rf"(?<=\.layers\.)(?!\d)|{_NO_EXPERT.pattern}")
"""Where the number of a layer or of an expert is missing: it is a leading dim."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A stored box of a key."""

    key: str
    shape: tuple[int, ...]
    box: Box
    file: str
    start: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.key}[{', '.join(f'{a}:{b}' for a, b in zip(self.box.lo, self.box.hi, strict=True))}]"


class _Holders:
    """Collects shards, one holder for each key of a parameter: megatron's specs name some parameters differently."""

    def __init__(self) -> None:
        self.keys: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        self.tensors: list[dict[str, TensorSpec]] = []
        self.buffers: list[list[BufferSpec]] = []
        self.shards: list[list[Shard]] = []

    def holder(self, placed: Placed, key: str) -> int:
        """0 for the first key that holds this parameter, 1 for the second."""
        first = placed.regions[0]
        keys = self.keys.setdefault((first.tensor.name, first.box.lo), [])
        if key not in keys:
            keys.append(key)
        number = keys.index(key)
        if number == len(self.shards):
            self.tensors.append({})
            self.buffers.append([])
            self.shards.append([])
        return number

    def layouts(self) -> tuple[RankLayout, ...]:
        parts = zip(self.tensors, self.buffers, self.shards, strict=True)
        return tuple(
            RankLayout(
                side="trainer",
                rank=rank,
                world_size=len(self.shards),
                coords={"pp": 0, "ep": 0},
                tensors=tuple(tensors.values()),
                buffers=tuple(buffers),
                shards=tuple(shards),
            )
            for rank, (tensors, buffers, shards) in enumerate(parts)
        )


def read_torch_dist(folder: Path, model: Model, *, masters: bool = False) -> Holding:
    """Where every weight of the checkpoint lies; optimizer state and the like are left out, by name.

    `masters`: instead of a weight its fp32 master, and the weight itself only where it has none.

    ConvertError names the key and file that do not fit: unknown, of another shape, stored twice, cut off.
    """
    chunks, left_out = _index(folder, masters)
    holders, extents = _Holders(), {}
    files: dict[str, BinaryIO] = {}
    try:
        for chunk in chunks:
            if chunk.file not in files:
                files[chunk.file] = open_file(folder / chunk.file)
            where = f"{chunk.name} in {folder / chunk.file}"
            stored = read_torch_file(files[chunk.file], chunk.start, chunk.length, where)
            if not isinstance(stored.tree, TensorRef) or stored.tree.shape != chunk.box.shape:
                raise ConvertError(f"{where} is not the tensor that {INDEX} says; save it again")
            extent = Extent(chunk.file, stored.start(stored.tree, where))
            for rank in _place(chunk, stored.tree, model, holders):
                extents[rank, chunk.name] = extent
    finally:
        for file in files.values():
            file.close()
    if not extents:
        raise ConvertError(f"{folder} holds no weights; name the folder of one step of a training")
    _check_stored_once(folder, holders)
    grouped = sum(map(_has_several_experts, chunks))
    return Holding("torch_dist", folder, holders.layouts(), extents, tuple(left_out), grouped)


def _index(folder: Path, masters: bool) -> tuple[list[_Chunk], list[str]]:
    """The boxes of all weights, and the keys of everything else."""
    try:
        metadata = inert_pickle.loads((folder / INDEX).read_bytes())
        places = {
            (str(index.fqn), _ints(index.offset)): info
            for index, info in metadata.storage_data.items()
            if getattr(index, "offset", None) is not None
        }
        described = dict(metadata.state_dict_metadata)
        weights = _weights(folder, [str(key) for key, entry in described.items() if _is_tensor(entry)], masters)
        chunks, left_out = [], []
        for key, entry in described.items():
            if str(key) not in weights:
                left_out.append(str(key))
                continue
            for part in entry.chunks:
                low = _ints(part.offsets)
                box = Box(low, tuple(a + n for a, n in zip(low, _ints(part.sizes), strict=True)))
                info = places.get((str(key), low))
                if info is None:
                    raise ConvertError(f"{folder / INDEX} does not say where {key} from {low} is; save it again")
                file = str(info.relative_path)
                chunks.append(
                    _Chunk(weights[str(key)], _ints(entry.size), box, file, int(info.offset), int(info.length))
                )
    except OSError as error:
        raise ConvertError(f"{folder / INDEX} cannot be read: {error.strerror}") from error
    except inert_pickle.ERRORS as error:
        if isinstance(error, ConvertError):
            raise
        raise ConvertError(
            f"{folder / INDEX} is no index of a checkpoint, or damaged ({error}); save it again"
        ) from error
    return chunks, left_out


def _weights(folder: Path, stored: Sequence[str], masters: bool) -> dict[str, str]:
    """The stored keys that are read, each with the key of its weight."""
    plain = {key: key for key in stored if not _NO_WEIGHT.search(key)}
    if not masters:
        return plain
    found = {key: match[1] for key in stored if (match := _MASTER.fullmatch(key))}
    if not found:
        raise ConvertError(
            f"{folder} holds no fp32 masters by parameters (optimizer.state.param.*); leave --from-masters out"
        )
    stepped = set(found.values())
    return {key: weight for key, weight in plain.items() if weight not in stepped} | found


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, Opaque) and type(entry).__name__ == "TensorStorageMetadata"


def _ints(numbers: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers)


def _place(chunk: _Chunk, ref: TensorRef, model: Model, holders: _Holders) -> set[int]:
    """Adds the shards of a box; returns its holders."""
    key, half = chunk.key, {GATE: 0, UP: 1}.get(chunk.key[-2:])
    if half is not None:
        key = key[:-2]
    ahead = len(_NO_NUMBER.findall(key))
    if len(chunk.shape) < ahead:
        raise ConvertError(f"{chunk.key} has shape {chunk.shape}, too few dims for layers and experts; save it again")
    shape, window = chunk.shape[ahead:], Box(chunk.box.lo[ahead:], chunk.box.hi[ahead:])
    ranks = set()
    for numbers in product(*map(range, chunk.box.lo[:ahead], chunk.box.hi[:ahead])):
        parameter = _parameter(key, numbers, model)
        placed = _placed(parameter, shape, model)
        rows = placed.shape[0] if half is None else placed.shape[0] // 2
        if shape != (rows, *placed.shape[1:]):
            raise ConvertError(f"{chunk.key} has shape {chunk.shape}; {parameter} of config.json has {placed.shape}")
        inside = _moved(window, half * rows) if half else window
        rank = holders.holder(placed, key)
        base = sum((n - low) * step for n, low, step in zip(numbers, chunk.box.lo, ref.strides, strict=False))
        found = window_shards(placed, inside, ref.strides[ahead:], rank=rank, buffer=chunk.name, base=base)
        for tensor, shard in found:
            holders.tensors[rank][tensor.name] = tensor
            holders.shards[rank].append(shard)
        ranks.add(rank)
    span = 1 + sum((n - 1) * step for n, step in zip(ref.shape, ref.strides, strict=True))
    for rank in ranks:
        holders.buffers[rank].append(BufferSpec(chunk.name, span, ref.storage.dtype))
    return ranks


def _parameter(key: str, numbers: Sequence[int], model: Model) -> str:
    """Canonical name of a key's parameter, for the layer and the expert that stand ahead in its box."""
    left = iter(numbers)
    name = _NO_NUMBER.sub(lambda _: f"{next(left)}.", key).replace(_EXPERTS, _LOCAL_EXPERTS)
    return canonical_name(name, model)


def _moved(window: Box, rows: int) -> Box:
    return Box((window.lo[0] + rows, *window.lo[1:]), (window.hi[0] + rows, *window.hi[1:]))


def _has_several_experts(chunk: _Chunk) -> bool:
    """Whether the box is one of GroupedMLP's: its experts are the last of the leading dims."""
    ahead = len(_NO_NUMBER.findall(chunk.key))
    return _NO_EXPERT.search(chunk.key) is not None and chunk.box.shape[ahead - 1] > 1


def _placed(parameter: str, shape: tuple[int, ...], model: Model) -> Placed:
    try:
        entry = model.family.trainer_entry(parameter, model.shape)
        return place_trainer_param(entry, ONE_RANK, shape[0] if entry.rule == "vocab" else 0)
    except ValueError as error:
        raise ConvertError(str(error)) from error


def _check_stored_once(folder: Path, holders: _Holders) -> None:
    for rank, shards in enumerate(holders.shards):
        stored: dict[str, int] = {}
        for shard in shards:
            stored[shard.tensor] = stored.get(shard.tensor, 0) + shard.box.volume
        for name, num in stored.items():
            if num > prod(holders.tensors[rank][name].shape):
                raise ConvertError(f"{folder}: boxes of {name} overlap: {num} elements are stored; save it again")


def parts_of(parameter: str, placed: Placed, rule: str, model: Model) -> Iterator[tuple[str, Box]]:
    """The keys that a parameter is written under, each with its box of the parameter.

    Where megatron's specs (local, Transformer Engine) name a parameter differently, it is written under both names.
    """
    whole = Box.full(placed.shape)
    for name in _keys(parameter, model):
        if rule not in _GATED:
            yield name, whole
            continue
        rows = placed.shape[0] // 2
        yield name + GATE, Box(whole.lo, (rows, *whole.hi[1:]))
        yield name + UP, Box((rows, *whole.lo[1:]), whole.hi)


def _keys(parameter: str, model: Model) -> list[str]:
    """A parameter's name in each of megatron's specs, as a key. Experts have one key in all of them."""
    names = (parameter,) if _LOCAL_EXPERTS in parameter else model.family.trainer_spellings(parameter)
    return [megatron_name(name, model).replace(_LOCAL_EXPERTS, _EXPERTS) for name in names]
