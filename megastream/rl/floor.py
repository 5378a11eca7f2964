"""The fewest bytes that an update can need: what the engine's ranks compute with, once each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megastream.layout.shard import RankLayout

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Floor:
    """`num_bytes` in wire dtype; `unused` lists live copies that no step reads, `padding` what only fills up rows."""

    num_bytes: int
    num_tensors: int
    unused: tuple[str, ...]
    padding: dict[str, int]


def engine_floor(layouts: Sequence[RankLayout]) -> Floor:
    """From the live tensors of all engine ranks, as they describe themselves."""
    num_bytes, num_tensors, unused, padding = 0, 0, [], {}
    for layout in layouts:
        covered: dict[str, int] = {}
        for shard in layout.shards:
            covered[shard.buffer] = covered.get(shard.buffer, 0) + shard.box.volume
        unused += [f"rank {layout.rank}: {name}" for name in layout.unused]
        for buffer in layout.buffers:
            num_tensors += 1
            num_bytes += covered[buffer.name] * ITEM_BYTES[buffer.dtype]
            if buffer.num_elements != covered[buffer.name]:
                padding[f"rank {layout.rank}: {buffer.name}"] = buffer.num_elements - covered[buffer.name]
    return Floor(num_bytes, num_tensors, tuple(unused), padding)
