"""The header that travels before every piece."""

from __future__ import annotations

from typing import Literal

import msgspec

HEADER_BYTES = 512
"""Size of an encoded header on the wire: msgpack, then zero padding."""

Encoding = Literal["dense", "delta"]
HeaderKind = Literal["piece", "close"]


class HeaderError(ValueError):
    """A header that cannot be read, or that does not belong to this attachment."""


class PieceHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Identifies one piece. `seq` is the piece's index in the plan, so both ends know its copies from the plan alone.

    `num_bytes` counts the payload; `checksum` is the payload's in 64 bits: xxh3-64 where it lies in host memory, a
    weighted sum of its words on a GPU (transport/checksum.py). A header of kind `close` has no payload and ends a lane.
    `base_version`, `namespace` and `encoding="delta"` are reserved: a receiver refuses other values by name.
    """

    kind: HeaderKind
    run_id: str
    incarnation: int
    attachment: str
    version: int
    attempt: int
    unit: str
    plan_digest: str
    source: int
    target: int
    seq: int
    num_bytes: int
    checksum: int
    encoding: Encoding = "dense"
    base_version: int = -1
    namespace: str = "base"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PieceHeader)


def encode_header(header: PieceHeader) -> bytes:
    """Exactly HEADER_BYTES bytes: a 2-byte length, the msgpack body, zero padding."""
    body = _encoder.encode(header)
    if len(body) > HEADER_BYTES - 2:
        raise HeaderError(f"piece header of unit {header.unit} takes {len(body)} bytes, {HEADER_BYTES - 2} fit")
    return (len(body).to_bytes(2, "little") + body).ljust(HEADER_BYTES, b"\0")


def decode_header(raw: bytes | memoryview) -> PieceHeader:
    """Inverse of `encode_header`. Raises HeaderError on anything else."""
    view = memoryview(raw)
    length = int.from_bytes(view[:2], "little")
    if len(view) != HEADER_BYTES or not 0 < length <= HEADER_BYTES - 2:
        raise HeaderError(f"piece header of {len(view)} bytes claims a body of {length}")
    try:
        return _decoder.decode(view[2 : 2 + length])
    except msgspec.MsgspecError as error:
        raise HeaderError(f"piece header cannot be read: {error}") from error
