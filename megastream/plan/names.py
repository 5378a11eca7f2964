"""The join by name: which layout describes which tensors, and what both sides must agree on before anything else.

Names are looked at once for each list of tensors, and most layouts share one: replicas and cuts of the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from megastream.layout.columns import Ints, Numbered, ints
from megastream.layout.shard import RankLayout, TensorSpec

MAX_ELEMENTS = 1 << 50
"""Of a tensor; far above any there is, and low enough that no sum over a plan leaves 64 bits."""


@dataclass(frozen=True)
class Names:
    """The tensors of both sides, numbered in the order in which they are first described.

    Tensor i has the shape `shapes[shape[i]]`. `lists`: the numbers of what is described, by the `id` of a layout's
    tuple of tensors.
    """

    tensors: tuple[TensorSpec, ...]
    shape: Ints
    shapes: tuple[tuple[int, ...], ...]
    lists: dict[int, Ints]

    def of(self, layout: RankLayout) -> Ints:
        """The numbers of the tensors that a layout describes, in its order."""
        return self.lists[id(layout.tensors)]

    def held(self, layouts: Sequence[RankLayout]) -> npt.NDArray[np.bool_]:
        """Of every tensor whether one of these layouts describes it."""
        found = np.zeros(len(self.tensors), dtype=bool)
        for numbers in {id(layout.tensors): self.of(layout) for layout in layouts}.values():
            found[numbers] = True
        return found


def join_names(layouts: Sequence[RankLayout]) -> Names:
    """ValueError names a tensor whose shape differs between two layouts, or that is too large for any plan."""
    names, shapes = Numbered[str](), Numbered[tuple[int, ...]]()
    described: dict[int, RankLayout] = {}
    for layout in layouts:
        described.setdefault(id(layout.tensors), layout)
    specs = [spec for layout in described.values() for spec in layout.tensors]
    number = ints(names.numbers([spec.name for spec in specs]))
    kind = ints(shapes.numbers([spec.shape for spec in specs]))
    # Of several assignments to one element the last one stays: here that of the first layout.
    first = np.zeros(len(names), dtype=np.int64)
    first[number[::-1]] = np.arange(len(number))[::-1]
    shape = kind[first]
    ends = np.cumsum(ints(len(layout.tensors) for layout in described.values()))
    for row in np.flatnonzero(shape[number] != kind)[:1].tolist():
        layout = list(described.values())[int(np.searchsorted(ends, row, side="right"))]
        spec, other = specs[row], specs[first[number[row]]]
        raise ValueError(f"{spec.name}: {layout.side} rank {layout.rank} says {spec.shape}, another rank {other.shape}")
    tensors = tuple([specs[row] for row in first.tolist()])
    for at, large in enumerate(shapes.items):
        if prod(large) > MAX_ELEMENTS:
            name = tensors[int(np.flatnonzero(shape == at)[0])].name
            raise ValueError(f"{name}: shape {large} is more than {MAX_ELEMENTS} elements")
    return Names(tensors, shape, tuple(shapes.items), dict(zip(described, np.split(number, ends[:-1]), strict=True)))


def check_names(names: Names, trainer: Sequence[RankLayout], engine: Sequence[RankLayout]) -> None:
    """Both sides describe the same tensors. ValueError lists those that one side has alone."""
    ours, theirs = names.held(trainer), names.held(engine)
    for lacks, sides in ((theirs & ~ours, "engine, not the trainer"), (ours & ~theirs, "trainer, not the engine")):
        if lacks.any():
            some = [names.tensors[number].name for number in np.flatnonzero(lacks)[:5].tolist()]
            raise ValueError(f"{lacks.sum()} tensors are held by the {sides}: {', '.join(some)}")
