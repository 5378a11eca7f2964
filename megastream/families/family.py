"""A family: its table, and the look-ups that layouts and plans make in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from megastream.families.known import Alike, Known, Match, Sized
from megastream.families.types import ModelShape, Place, Row
from megastream.layout.naming import Entry, Kind
from megastream.layout.shard import TensorSpec

_NUMBER = re.compile(r"\.(\d+)(?=\.)")
_LAST_NUMBER = re.compile(r"(?:(?<=\.weight)|(?<=\.bias))\d+$")
_LAYERS = "model.layers."
_LAYER = re.compile(r"model\.layers\.\d+\.")
_IN_LAYER = re.compile(r"(\w+\.layers\.)(\d+)(\..+)")
_FIELD = re.compile(r"\{(layer|expert)\}")


@dataclass(frozen=True)
class Family:
    """One model family. `sizes` gives the numbers that table dims are written in; `is_moe(shape, layer)` its layers.

    `is_delta(shape, layer)`: its layers with a gated delta net in place of attention. `attention` is the other layers'
    module that holds vLLM's scales of keys and values. `trainer_differs`: why what Megatron computes with is not what
    the files hold, moved around; its forms and its live models are then refused, and the table's trainer side is what
    plans count. `drafts`: beginnings of the names that layers for speculative decoding have in files, where no number
    of a layer tells them; they are left out. `aliases`: beginnings of vLLM's names inside a layer, and of the other
    names under which the same modules hang there; the state that vLLM saves and loads by itself (`sharded_state`) has
    the name that sorts first. `num_groups(shape)`: groups of experts, if vLLM's model tells its placement of them.
    `has_eplb`: vLLM's model can have experts more than once, and elsewhere (EPLB).
    """

    name: str
    rows: tuple[Row, ...]
    read: Callable[[dict[str, object]], ModelShape]
    sizes: Callable[[ModelShape], dict[str, int]]
    is_moe: Callable[[ModelShape, int], bool]
    is_delta: Callable[[ModelShape, int], bool] | None = None
    attention: str = "self_attn.attn"
    trainer_differs: str = ""
    drafts: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    num_groups: Callable[[ModelShape], int] | None = None
    has_eplb: bool = False

    def tensors(self, shape: ModelShape) -> tuple[TensorSpec, ...]:
        """Every Hugging Face tensor of the model, each once, in the order of the table and of the layers.

        Where one dim of the file holds two things in turns (`Source.joined`), the shape here has a dim for each: the
        same elements in the same order; see `file_shape`.
        """
        specs: dict[str, TensorSpec] = {}
        layers = range(shape.num_layers + shape.mtp_layers)
        for row, layer, expert in self._walk(shape, layers, range(shape.num_experts)):
            for spec in _specs(self._sized(row, shape), layer, expert):
                specs.setdefault(spec.name, spec)
        return tuple(specs.values())

    def file_shape(self, name: str, shape: ModelShape) -> tuple[int, ...]:
        """The shape of a Hugging Face tensor in its file: that of `tensors`, but for dims that are split there."""
        sizes, pattern = self.sizes(shape), _NUMBER.sub(".#", name)
        for row in self.rows:
            source = next((s for s in row.sources if _FIELD.sub("#", s.name) == pattern), None)
            if source is not None and _exists(row, sizes):
                dims = [sizes[dim] for dim in source.dims]
                return (*dims[: -source.joined], prod(dims[-source.joined :]))
        raise ValueError(f"Hugging Face tensor {name} is not in family {self.name} with this config.json")

    def is_linear(self, name: str) -> bool:
        """Whether a Hugging Face tensor is the weight of a linear; see `Source`."""
        return _NUMBER.sub(".#", name) in self._linears

    def dtypes(self, name: str, shape: ModelShape) -> tuple[str, str]:
        """The types that the trainer and the engine keep a Hugging Face tensor in."""
        fp32 = self._match(self._hf_index, name, "Hugging Face tensor").row.fp32
        return "float32" if "trainer" in fp32 else shape.dtype, "float32" if "engine" in fp32 else shape.dtype

    @property
    def has_mtp(self) -> bool:
        """Whether the table has the layers of multi-token prediction."""
        return any(row.layers == "mtp" for row in self.rows)

    def has_delta(self, shape: ModelShape, layer: int) -> bool:
        """Whether the layer has a gated delta net in place of attention."""
        return self.is_delta is not None and self.is_delta(shape, layer)

    def num_experts(self, shape: ModelShape) -> int:
        """Routed experts of a layer, over all ranks."""
        return shape.num_experts

    def place(self, name: str) -> Place:
        """Where a Hugging Face tensor belongs. ValueError names a tensor without a rule."""
        match = self._match(self._hf_index, name, "Hugging Face tensor")
        return Place(match.row.kind, match.layer, match.expert)

    def places(self, names: Iterable[str]) -> list[Place]:
        """`place` of each name. Layers repeat their names: what stands behind a layer's number is looked up once."""
        known: dict[str, Place] = {}
        found = []
        for name in names:
            layer, _, inside = name.removeprefix(_LAYERS).partition(".")
            place = known.get(inside)
            if place is None or not (layer.isdecimal() and name.startswith(_LAYERS)):
                place = self.place(name)
                if place.layer is not None:
                    known[inside] = place
            found.append(Place(place.kind, None if place.layer is None else int(layer), place.expert))
        return found

    def trainer_entry(self, name: str, shape: ModelShape) -> Entry:
        """Meaning of a canonical Megatron name. ValueError names a parameter without a rule."""
        return self._entry("trainer", name, shape, None)

    def trainer_spellings(self, name: str) -> tuple[str, ...]:
        """A parameter's canonical name in each of Megatron's specs; see `Row`. ValueError as of `trainer_entry`."""
        match = self._match(self._trainer_index, name, "trainer parameter")
        return tuple(spelling.format(layer=match.layer, expert=match.expert) for spelling in match.row.trainer)

    def engine_entry(self, name: str, shape: ModelShape, expert: int | None = None) -> Entry:
        """Meaning of a live engine name; for stacked experts, of the slot that holds global expert `expert`."""
        return self._entry("engine", name, shape, expert)

    def engine_stacks_experts(self, name: str) -> bool:
        """True when the engine parameter holds one expert per index of its leading dim."""
        return self._match(self._engine_index, name, "engine parameter").row.engine_stacked

    def trainer_names(self, shape: ModelShape, layers: Sequence[int], experts: Sequence[int]) -> Iterator[str]:
        """Canonical Megatron names (local spec) of a rank with these layers and experts; inside layers only."""
        for row, layer, expert in self._walk(shape, layers, experts):
            if layer is not None and row.trainer:
                yield row.trainer[0].format(layer=layer, expert=expert)

    def engine_names(self, shape: ModelShape, layers: Sequence[int]) -> Iterator[str]:
        """Live engine names of a rank with these layers; inside layers only."""
        for row, layer, expert in self._walk(shape, layers, range(shape.num_experts)):
            if layer is not None and row.engine and not (row.engine_stacked and expert):
                yield row.engine.format(layer=layer, expert=expert)

    def outer_names(self, side: Literal["trainer", "engine"], shape: ModelShape) -> dict[Kind, str]:
        """The names outside the layers, by kind: embed, norm, head."""
        rows = [row for row in self.rows if row.layers == "none"]
        return {row.kind: row.engine if side == "engine" else row.trainer[0] for row in rows}

    def state_name(self, name: str) -> str:
        """The name in vLLM's saved state of a live engine parameter."""
        return self._renamed(name, self.aliases)

    def engine_name(self, state_name: str) -> str:
        """The inverse of `state_name`; names that are no alias stay."""
        return self._renamed(state_name, tuple((alias, name) for name, alias in self.aliases))

    def _renamed(self, name: str, pairs: Sequence[tuple[str, str]]) -> str:
        layer = _LAYER.match(name)
        if layer is None:
            return name
        inside = name[layer.end() :]
        for old, new in sorted(pairs, key=lambda pair: -len(pair[0])):
            if inside.startswith(old):
                return layer[0] + new + inside.removeprefix(old)
        return name

    def engine_spares(self) -> tuple[Kind, ...]:
        """Kinds outside the layers that the engine keeps on every pipeline stage, also where no step reads them."""
        return tuple(row.kind for row in self.rows if row.engine_spare)

    def _walk(
        self, shape: ModelShape, layers: Sequence[int], experts: Sequence[int]
    ) -> Iterator[tuple[Row, int | None, int | None]]:
        rows = [row for row in self.rows if self._sized(row, shape).exists]
        for row in rows:
            if row.layers == "none":
                yield row, None, None
        for layer in layers:
            kinds = ["every", "moe" if self.is_moe(shape, layer) else "dense"]
            kinds.append("delta" if self.has_delta(shape, layer) else "full")
            kinds += ["mtp"] if layer >= shape.num_layers else []
            for row in rows:
                if row.layers in kinds:
                    for expert in experts if row.kind == "expert" else (None,):
                        yield row, layer, expert

    def _entry(self, side: Literal["trainer", "engine"], name: str, shape: ModelShape, expert: int | None) -> Entry:
        """Layers repeat their names: what a name stands for is worked out once for all layers of a shape."""
        inside = _IN_LAYER.fullmatch(name)
        entries = self._known(shape).entries
        key: tuple[str | int | None, ...]
        key = (side, name, expert) if inside is None else (side, inside[1], inside[3], expert)
        alike = entries.get(key)
        if alike is None:
            alike = entries[key] = self._first_entry(side, name, shape, expert)
        layer, num_layers = alike.layer if inside is None else int(inside[2]), shape.num_layers + shape.mtp_layers
        if layer is not None and layer >= num_layers:
            raise ValueError(f"{name}: layer {layer} of a model with {num_layers} layers")
        return alike.entry if layer == alike.layer or layer is None else alike.at(layer)

    def _first_entry(
        self, side: Literal["trainer", "engine"], name: str, shape: ModelShape, expert: int | None
    ) -> Alike:
        index = self._trainer_index if side == "trainer" else self._engine_index
        match = self._match(index, name, f"{side} parameter")
        row, layer, expert = match.row, match.layer, match.expert if expert is None else expert
        if row.kind == "expert" and not 0 <= (-1 if expert is None else expert) < shape.num_experts:
            raise ValueError(f"{name}: expert {expert} of a model with {shape.num_experts} experts")
        sized = self._sized(row, shape)
        if not sized.exists:
            raise ValueError(f"{name}: a {self.name} with this config.json does not have it")
        rule = row.trainer_rule if side == "trainer" else row.engine_rule
        dtype = "float32" if side in row.fp32 else shape.dtype
        specs = _specs(sized, layer, expert)
        entry = Entry(row.kind, rule, specs, shape.head_dim, dtype, expert or 0, sized.parts)
        around = [tuple(part.format(expert=expert) for part in source.split("{layer}")) for source, _ in sized.sources]
        return Alike(entry, layer, tuple(around))

    def _match(self, index: dict[str, Row], name: str, what: str) -> Match:
        parts = _NUMBER.split(name)
        pattern, numbers = ".#".join(parts[::2]), [int(number) for number in parts[1::2]]
        row = index.get(pattern)
        if row is None and (last := _LAST_NUMBER.search(name)):
            row = index.get(pattern[: -len(last[0])] + "#")
            numbers.append(int(last[0]))
        if row is None:
            raise ValueError(f"{what} {name} has no rule in family {self.name}: add a row to its table")
        return Match(row, *numbers)

    def _sized(self, row: Row, shape: ModelShape) -> Sized:
        """Asked once for each tensor of a large model, so it is worked out once for each row."""
        known = self._known(shape).sized
        found = known.get(id(row))
        if found is None:
            sizes = self.sizes(shape)
            tied = (row.tied_to,) if shape.tied and row.tied_to is not None else row.sources
            sources = tuple((source.name, tuple(sizes[dim] for dim in source.dims)) for source in tied)
            dtype = "float32" if "file" in row.fp32 else shape.dtype
            parts = tuple(tuple(sizes[part] for part in source.parts) for source in tied)
            found = known[id(row)] = Sized(_exists(row, sizes), sources, dtype, parts)
        return found

    def _known(self, shape: ModelShape) -> Known:
        known: Known | None = shape.known.get(self.name)
        if known is None or known.rows is not self.rows:
            known = shape.known[self.name] = Known(self.rows)
        return known

    @cached_property
    def _linears(self) -> frozenset[str]:
        return frozenset(_FIELD.sub("#", s.name) for row in self.rows for s in row.sources if s.linear)

    @cached_property
    def _hf_index(self) -> dict[str, Row]:
        return _index((row, source.name) for row in self.rows for source in row.sources)

    @cached_property
    def _trainer_index(self) -> dict[str, Row]:
        return _index((row, name) for row in self.rows for name in row.trainer)

    @cached_property
    def _engine_index(self) -> dict[str, Row]:
        return _index((row, row.engine) for row in self.rows if row.engine)


def _index(names: Iterator[tuple[Row, str]]) -> dict[str, Row]:
    """Rows by name, with # for numbers; the layer's stands before the expert's in all of them."""
    return {_FIELD.sub("#", name): row for row, name in names}


def _exists(row: Row, sizes: dict[str, int]) -> bool:
    return all(sizes[dim] for source in row.sources for dim in source.dims)


def _specs(sized: Sized, layer: int | None, expert: int | None) -> tuple[TensorSpec, ...]:
    names = [(name.format(layer=layer, expert=expert), shape) for name, shape in sized.sources]
    return tuple([TensorSpec(name, shape, sized.dtype) for name, shape in names])
