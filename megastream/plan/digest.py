"""One number that all ranks compare before the first byte moves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from megastream.layout.rules import RULES_VERSION
from megastream.layout.shard import RankLayout
from megastream.layout.wire import encode_layout
from megastream.plan.types import Piece

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def plan_digest(
    trainer: Sequence[RankLayout],
    engine: Sequence[RankLayout],
    pieces: Sequence[Piece],
    options: dict[str, str | int],
) -> str:
    """xxh3-128 in hex over the rules' version, the options, both layouts and every piece.

    The pieces hold what follows from the rest (source choice, order, casts): two releases that choose differently
    from equal layouts also get different digests.
    """
    digest = xxhash.xxh3_128()
    digest.update(_encoder.encode((RULES_VERSION, options)))
    for layouts in (trainer, engine):
        for layout in sorted(layouts, key=lambda layout: layout.rank):
            digest.update(encode_layout(layout))
    digest.update(_encoder.encode(pieces))
    return digest.hexdigest()
