"""Parameters that are alike lie alike: each kind of parameter is placed once, and the place is used for all of them.

What a rule says depends on the shapes of the tensors and on the cut, not on names. The layers of a model repeat a dozen
kinds of parameters, so the boxes of a rank are a few dozen, shared by hundreds of thousands of shards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from megastream.layout.box import Box
from megastream.layout.naming import Entry, Names
from megastream.layout.pack import row_major_strides
from megastream.layout.placing import Cut, Placed, Region
from megastream.layout.rules import RULES, expert_stack
from megastream.layout.shard import TensorSpec

ShapeT = TypeVar("ShapeT")


@dataclass(frozen=True, slots=True)
class Part:
    """One region of a placed parameter: which of its tensors, by index, and at which element of it."""

    index: int
    region: Region
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A placed parameter without names."""

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    """What parts count in; see `Placed`."""
    parts: tuple[Part, ...]

    def inside(self, windows: Sequence[Box]) -> Pattern:
        """Only what lies inside these boxes, given in coordinates of the grid."""
        found = [(part.index, part.region.within(window)) for part in self.parts for window in windows]
        return _pattern(self.shape, self.grid, [(index, region) for index, region in found if region is not None])


def _pattern(shape: tuple[int, ...], grid: tuple[int, ...], regions: Sequence[tuple[int, Region]]) -> Pattern:
    steps = row_major_strides(grid)
    parts = tuple(
        Part(index, region, sum(map(int.__mul__, region.origin, steps)), tuple(steps[dim] for dim in region.dims))
        for index, region in regions
    )
    return Pattern(shape, grid, parts)


class _Known(msgspec.Struct, frozen=True, gc=False):
    """What a name stands for. Names of one `kind` have equal rules and tensors of equal shapes; `padded`: the number
    of padded rows matters."""

    entry: Entry
    kind: int
    padded: bool


class Patterns(Generic[ShapeT]):
    """Looks parameters of one model up; hand one object on to share it between ranks."""

    def __init__(self, family: Names[ShapeT], shape: ShapeT) -> None:
        self.family, self.shape = family, shape
        self._trainer: dict[str, _Known] = {}
        self._engine: dict[tuple[str, int | None], _Known] = {}
        self._stacked: dict[str, bool] = {}
        self._kinds: dict[Hashable, int] = {}
        self._stacks: dict[tuple[str, tuple[int, ...]], tuple[Hashable, tuple[TensorSpec, ...]]] = {}
        self._patterns: dict[Hashable, Pattern] = {}

    def trainer_entry(self, name: str) -> Entry:
        """`Names.trainer_entry`, asked once for each name."""
        return self._of_trainer(name).entry

    def engine_entry(self, name: str, expert: int | None = None) -> Entry:
        """`Names.engine_entry`, asked once for each name and expert."""
        return self._of_engine(name, expert).entry

    def stacks_experts(self, name: str) -> bool:
        """`Names.engine_stacks_experts`, asked once for each name."""
        if name not in self._stacked:
            self._stacked[name] = self.family.engine_stacks_experts(name)
        return self._stacked[name]

    def of_trainer(self, name: str) -> tuple[Hashable, Sequence[TensorSpec]]:
        """What kind of parameter a Megatron parameter is, and its tensors. Those of a kind lie alike on a rank."""
        known = self._of_trainer(name)
        return known.kind, known.entry.tensors

    def of_engine(self, name: str, experts: tuple[int, ...] | None) -> tuple[Hashable, Sequence[TensorSpec]]:
        """The same of a live engine parameter; `experts`: the global expert of every slot, if it stacks them."""
        if not self.stacks_experts(name):
            known = self._of_engine(name, None)
            return known.kind, known.entry.tensors
        if experts is None:
            raise ValueError(no_slots(name))
        return self._stack(name, experts)

    def trainer(
        self, name: str, dense: Cut, experts: Cut, padded_rows: int = 0
    ) -> tuple[Pattern, Sequence[TensorSpec]]:
        """How a Megatron parameter lies on the rank that these cuts give (experts: by etp), and its tensors.

        `padded_rows` as in `Fused`; not looked at where rows are neither padded nor a latent's.
        """
        known = self._of_trainer(name)
        return self._placed(known, experts if known.entry.kind == "expert" else dense, padded_rows)

    def engine(self, name: str, cut: Cut, padded_rows: int = 0) -> tuple[Pattern, Sequence[TensorSpec]]:
        """How a live engine parameter that stacks no experts lies on the rank that this cut gives, and its tensors.

        `padded_rows` as in `Fused`; not looked at where rows are not padded.
        """
        return self._placed(self._of_engine(name, None), cut, padded_rows)

    def engine_stack(self, name: str, cut: Cut, experts: tuple[int, ...]) -> tuple[Pattern, Sequence[TensorSpec]]:
        """The same for one that does; `experts` gives the global expert of every slot."""
        kinds, tensors = self._stack(name, experts)
        key = kinds, cut.axis, cut.rank, cut.size
        if key not in self._patterns:
            entries = [self.engine_entry(name, expert) for expert in experts]
            fused = [entry.fused() for entry in entries]
            rule = RULES[entries[0].rule] if entries else RULES["same"]
            self._patterns[key] = _indexed(expert_stack(rule, fused, cut), tensors)
        return self._patterns[key], tensors

    def _stack(self, name: str, experts: tuple[int, ...]) -> tuple[Hashable, tuple[TensorSpec, ...]]:
        found = self._stacks.get((name, experts))
        if found is None:
            known = [self._of_engine(name, expert) for expert in experts]
            # An expert in several slots is one tensor there, so such a stack is like no other.
            twice = experts if len(set(experts)) < len(experts) else None
            tensors = tuple([spec for each in known for spec in each.entry.tensors])
            found = self._stacks[name, experts] = (twice, *[each.kind for each in known]), tensors
        return found

    def _placed(self, known: _Known, cut: Cut, padded_rows: int) -> tuple[Pattern, Sequence[TensorSpec]]:
        entry, padded_rows = known.entry, padded_rows if known.padded else 0
        key = known.kind, padded_rows, cut.axis, cut.rank, cut.size
        pattern = self._patterns.get(key)
        if pattern is None:
            placed = RULES[entry.rule](entry.fused(padded_rows), cut)
            pattern = self._patterns[key] = _indexed(placed, entry.tensors)
        return pattern, entry.tensors

    def _of_trainer(self, name: str) -> _Known:
        known = self._trainer.get(name)
        if known is None:
            known = self._trainer[name] = self._known(self.family.trainer_entry(name, self.shape), ("vocab", "latent"))
        return known

    def _of_engine(self, name: str, expert: int | None) -> _Known:
        known = self._engine.get((name, expert))
        if known is None:
            known = self._engine[name, expert] = self._known(
                self.family.engine_entry(name, self.shape, expert), ("vocab",)
            )
        return known

    def _known(self, entry: Entry, padded: tuple[str, ...]) -> _Known:
        shapes = tuple([spec.shape for spec in entry.tensors])
        kind = entry.rule, entry.head_dim, entry.parts, _index_of(entry), shapes
        return _Known(entry, self._kinds.setdefault(kind, len(self._kinds)), entry.rule in padded)


def no_slots(name: str) -> str:
    """What is wrong with a stack of experts that does not say which ones they are."""
    return f"{name} stacks experts: the global expert of every slot is needed"


def _index_of(entry: Entry) -> int:
    """Where the expert lies in its tensors: matters only to the rules for tensors that hold all experts."""
    return entry.expert if entry.rule.startswith("stack_") else 0


def _indexed(placed: Placed, tensors: Sequence[TensorSpec]) -> Pattern:
    index = {spec.name: number for number, spec in enumerate(tensors)}
    return _pattern(placed.shape, placed.grid, [(index[region.tensor.name], region) for region in placed.regions])
