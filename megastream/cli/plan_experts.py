"""What `megastream plan` is told of where an engine's experts lie; refused where vLLM would not place them so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megastream.families import Family, ModelShape
from megastream.layout.expert_slots import ExpertMap, Placement
from megastream.layout.mesh import Mesh

IN_TURNS_BACKENDS = ("deepep_low_latency", "nixl_ep")
"""Of vLLM's `--all2all-backend`, those that take experts in turns. vLLM uses one with data parallelism only."""
MAX_SLOTS = 16_384
"""Of a layer: far above any engine there is."""


@dataclass(frozen=True)
class Placed:
    """Where an engine's experts lie. `num_slots`: of a layer, over all ranks that share its experts; `backends`: those
    of vLLM's `--all2all-backend` under which they lie so; None: under any."""

    placement: Placement | Literal["map"]
    num_experts: int
    num_slots: int
    backends: tuple[str, ...] | None

    def __str__(self) -> str:
        """What a person is told of it behind the layout."""
        if self.backends is not None:
            return f", only with --all2all-backend {' or '.join(self.backends)}"
        return f", {self.num_slots} slots for {self.num_experts} experts" if self.placement == "map" else ""

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {"placement": self.placement, "slots": self.num_slots, "all2all_backends": self.backends}


def place_experts(
    map_file: Path | None, family: Family, shape: ModelShape, engine: Mesh
) -> tuple[ExpertMap | None, Placed]:
    """The map, if one is given, and what there is to say of the placement. ValueError where vLLM has no such one."""
    if map_file is not None:
        found = _read_map(map_file, family, shape, engine)
        return found, Placed("map", shape.num_experts, found.num_slots, None)
    if engine.placement == "round_robin":
        _check_groups(family, shape, engine)
    backends = IN_TURNS_BACKENDS if engine.placement == "round_robin" and engine.dp > 1 else None
    return None, Placed(engine.placement, shape.num_experts, shape.num_experts, backends)


def _check_groups(family: Family, shape: ModelShape, engine: Mesh) -> None:
    """vLLM would place experts linearly all the same, and say so in its log only."""
    groups = None if family.num_groups is None else family.num_groups(shape)
    if groups is None or groups < 2:
        has = "has none" if groups is None else f"has one (n_group is {groups})"
        raise ValueError(
            f"engine layout {engine}: vLLM deals experts out in turns only where they are in several groups, and "
            f"{family.name} {has}; leave {engine.placement} out, as vLLM would"
        )


def _read_map(path: Path, family: Family, shape: ModelShape, engine: Mesh) -> ExpertMap:
    """A map in JSON: for each layer with experts the list [expert in slot 0, expert in slot 1, ...] over all ranks, as
    vLLM's `physical_to_logical_map`; or one such list, for all of them.

    ValueError names the file, and layer, slot and numbers that do not fit.
    """
    layers = [layer for layer in range(shape.num_layers) if family.is_moe(shape, layer)]
    if not family.has_eplb or not layers:
        raise ValueError(f"{path}: vLLM's {family.name} has each expert once, if any; leave --expert-map out")
    if engine.placement != "linear":
        raise ValueError(f"{path}: with a map vLLM has no {engine.placement}; leave it out of engine layout {engine}")
    if engine.ep == 1:
        remedy = f"write ep{engine.tp * engine.dp}, or" if engine.tp * engine.dp > 1 else "take more ranks, or"
        raise ValueError(
            f"{path}: engine layout {engine} has no expert parallelism, without which vLLM has each expert once; "
            f"{remedy} leave --expert-map out"
        )
    rows = _rows(path, len(layers))
    for layer, row in zip(layers, rows, strict=True):
        _check_row(f"{path}: layer {layer}", row, shape.num_experts, engine.ep)
        if len(row) != len(rows[0]):
            raise ValueError(
                f"{path}: layer {layer} has {len(row)} slots, layer {layers[0]} has {len(rows[0])}; all need as many"
            )
    return ExpertMap(dict(zip(layers, map(tuple, rows), strict=True)))


def _rows(path: Path, num_layers: int) -> list[Sequence[int]]:
    """A row for each layer with experts."""
    try:
        found: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path}: expected a list of experts, or one for each layer with experts")
    if not any(isinstance(row, list) for row in found):
        return [found] * num_layers
    for number, row in enumerate(found):
        if not isinstance(row, list):
            raise ValueError(f"{path}: row {number} is {row!r:.40}; expected a list of experts, like the other rows")
    if len(found) != num_layers:
        raise ValueError(
            f"{path}: {len(found)} rows, and the model has {num_layers} layers with experts; give a row for each, or "
            "one list for all"
        )
    return found


def _check_row(where: str, row: Sequence[Any], num_experts: int, ep: int) -> None:
    if len(row) > MAX_SLOTS:
        raise ValueError(f"{where} has {len(row)} slots; it has at most {MAX_SLOTS}")
    for slot, expert in enumerate(row):
        if isinstance(expert, bool) or not isinstance(expert, int) or not 0 <= expert < num_experts:
            raise ValueError(f"{where}, slot {slot} holds {expert!r:.40}; the model has experts 0 to {num_experts - 1}")
    if len(row) % ep:
        raise ValueError(f"{where} has {len(row)} slots, which do not divide by ep={ep}; each rank has as many")
    if missing := sorted(set(range(num_experts)) - set(row)):
        more = f", nor have {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(f"{where}: expert {missing[0]} has no slot among {len(row)}{more}; each needs one")
