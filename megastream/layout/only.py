"""Layouts that speak of some tensors of a model only."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from megastream.layout.columns import columns_of, ints
from megastream.layout.shard import RankLayout


def only(layout: RankLayout, tensors: Collection[str]) -> RankLayout:
    """What a layout says of these tensors. Its buffers stay; what else lies in them is not spoken of."""
    numbers = [number for number, spec in enumerate(layout.tensors) if spec.name in tensors]
    rows = np.flatnonzero(np.isin(columns_of(layout).tensor, ints(numbers)))
    return replace(
        layout,
        tensors=tuple(layout.tensors[number] for number in numbers),
        shards=tuple(layout.shards[row] for row in rows.tolist()),
    )
