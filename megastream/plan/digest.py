"""One number that all ranks compare before the first byte moves."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import xxhash

from megastream.layout.columns import Ints
from megastream.layout.rules import RULES_VERSION
from megastream.plan.pieces import PieceTable
from megastream.plan.table import Geometry, ShardTable

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def plan_digest(pieces: PieceTable, options: dict[str, str | int]) -> str:
    """xxh3-128 in hex over the rules' version, the options, both layouts and every piece.

    The pieces hold what follows from the rest (source choice, order, casts): two releases that choose differently
    from equal layouts also get different digests. All is hashed as columns; the numbers in them are given in the
    order of ranks and of their layouts, so equal layouts give equal columns.
    """
    digest, both = xxhash.xxh3_128(), pieces.tables
    digest.update(_encoder.encode((RULES_VERSION, options)))
    digest.update(_encoder.encode([spec.name for spec in both.tensors]))
    _add(digest, (both.shape, both.num_dims))
    _add_geometry(digest, both.geometry)
    for side in (both.source, both.target):
        _add_side(digest, side)
    digest.update(_encoder.encode((pieces.units, pieces.dtypes, pieces.copies.shapes)))
    _add(digest, pieces.columns)
    return digest.hexdigest()


def _add_geometry(digest: xxhash.xxh3_128, geometry: Geometry) -> None:
    dims = [(len(box.lo)) for box in geometry.boxes], [len(strides) for strides in geometry.strides]
    digest.update(_encoder.encode(dims))
    _add(digest, (geometry.lo, geometry.hi, geometry.steps))


def _add_side(digest: xxhash.xxh3_128, side: ShardTable) -> None:
    for layout in side.layouts:
        digest.update(_encoder.encode((layout.side, layout.rank, layout.world_size, layout.coords)))
        digest.update(_encoder.encode((layout.unused, layout.notes, layout.buffers)))
    lists = {id(layout.tensors): layout.tensors for layout in side.layouts}
    dtypes = {key: _encoder.encode([spec.dtype for spec in specs]) for key, specs in lists.items()}
    for layout in side.layouts:
        digest.update(dtypes[id(layout.tensors)])
    _add(digest, (side.described, side.rank, side.tensor, side.box, side.buffer, side.offset, side.strides))


def _add(digest: xxhash.xxh3_128, columns: Iterable[Ints]) -> None:
    for column in columns:
        digest.update(str(column.shape).encode())
        digest.update(column.astype("<i8").tobytes())
