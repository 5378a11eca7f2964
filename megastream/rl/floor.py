"""The fewest bytes that an update can need: what the engine's ranks compute with, once each.

Counted from vLLM's own parameters, not from layouts or plans: what those send is measured against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Floor:
    """`num_bytes` in wire dtype; `unused` lists live copies that no step reads, `padding` what only fills up rows."""

    num_bytes: int
    num_tensors: int
    unused: tuple[str, ...]
    padding: dict[str, int]


def engine_floor(replies: Sequence[dict[str, Any]], num_ranks: int) -> Floor:
    """From every engine rank's reply to `inventory`. ValueError when one is missing or could not tell."""
    ranks = sorted(reply["rank"] for reply in replies)
    if ranks != list(range(num_ranks)):
        raise ValueError(f"engine ranks {ranks} told what they hold, not one of each of {num_ranks}")
    num_bytes, num_tensors, unused, padding = 0, 0, [], {}
    for reply in replies:
        if not reply["ok"]:
            raise ValueError(f"engine rank {reply['rank']} cannot tell what it holds: {reply['error']}")
        for parameter in reply["parameters"]:
            name = f"rank {reply['rank']}: {parameter['name']}"
            if not parameter["used"]:
                unused.append(name)
                continue
            num_tensors += 1
            num_bytes += (parameter["elements"] - parameter["padding"]) * parameter["item_bytes"]
            if parameter["padding"]:
                padding[name] = parameter["padding"]
    return Floor(num_bytes, num_tensors, tuple(unused), padding)
