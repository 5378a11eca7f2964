"""Which experts lie in which slots of an engine rank: by vLLM's two placements, or by a map that is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Placement = Literal["linear", "round_robin"]
"""vLLM's `expert_placement_strategy`: consecutive experts on a rank, or every ep-th one."""


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """The expert in every slot, as vLLM's `physical_to_logical_map` has it for experts that may be there more than once
    (EPLB).

    `layers`: for each layer with experts, its slots over all ranks of expert parallelism; each rank has an equal part
    of them, in order.
    """

    layers: Mapping[int, tuple[int, ...]]

    @property
    def num_slots(self) -> int:
        """Of a layer."""
        return max(map(len, self.layers.values()))

    def held(self, layer: int, ep: int, rank: int) -> tuple[int, ...]:
        """The experts in the slots of one of `ep` ranks."""
        slots = self.layers[layer]
        num = len(slots) // ep
        return slots[rank * num : (rank + 1) * num]


def local_experts(num_experts: int, ep: int, rank: int, placement: Placement = "linear") -> tuple[int, ...]:
    """Those of one of `ep` ranks, each in one slot; remainder experts go to the lowest ranks."""
    if placement == "round_robin":
        return tuple(range(rank, num_experts, ep))
    base, extra = divmod(num_experts, ep)
    start = rank * base + min(rank, extra)
    return tuple(range(start, start + base + (rank < extra)))
