"""What the ends of all lanes share, whichever way their messages go."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from megastream.protocol.header import HeaderError, PieceHeader, decode_header
from megastream.protocol.lane import LaneCounters, LaneError, LaneTimeout
from megastream.transport.gloo_pair import PairBroken, PairTimeout

CLOSE_GRACE_S = 2.0
"""How long a closing sender waits for the receiver to take its closing header, and an acknowledgement may take."""

Way = TypeVar("Way")
"""What messages go through: a gloo pair, or a wire."""


class LaneEnd(Generic[Way]):
    """Its way, its name in messages, and the reason once it is broken."""

    def __init__(self, way: Way, name: str, device: str = "cpu") -> None:
        self.counters = LaneCounters()
        self.device = device
        self._way: Way | None = way
        self._name = name
        self._broken: str | None = None

    def _usable(self) -> Way:
        way = self._way
        if way is None:
            raise LaneError(f"{self._name}: closed")
        if self._broken is not None:
            raise LaneError(f"{self._name}: {self._broken}")
        return way

    def _fail(self, error: PairTimeout | PairBroken, doing: str, seconds: float) -> LaneError:
        """The error to raise; the lane is unusable from here on."""
        if isinstance(error, PairTimeout):
            self._broken = self._broken or f"{doing}: nothing within {seconds:.1f} s"
            return LaneTimeout(f"{self._name}: {self._broken}")
        self._broken = self._broken or f"{doing}: the peer is gone ({error})"
        return LaneError(f"{self._name}: {self._broken}")

    def _identify(self, header: PieceHeader) -> str:
        self._name = f"lane trainer {header.source} -> engine {header.target}"
        return f"unit {header.unit} of version {header.version}, piece {header.seq}"

    def _name_of(self, header: PieceHeader) -> str:
        what = self._identify(header)
        return f"{self._name}, {what}"

    def _read(self, raw: bytes) -> PieceHeader | None:
        """The header in these bytes; None for a closing one."""
        try:
            header = decode_header(raw)
        except HeaderError as error:
            self._broken = str(error)
            raise LaneError(f"{self._name}: {error}") from error
        if header.kind == "close":
            self._broken = "the sender closed the lane"
            return None
        self._identify(header)
        return header

    def _verify(self, header: PieceHeader, found: int) -> None:
        if found != header.checksum:
            raise LaneError(
                f"{self._name}: {self._identify(header)}: checksum {found:016x} of {header.num_bytes} bytes, sent "
                f"{header.checksum:016x}"
            )

    def _count(self, header: PieceHeader, header_bytes: int) -> None:
        self.counters.pieces += 1
        self.counters.payload_bytes += header.num_bytes
        self.counters.header_bytes += header_bytes


def closing_header(last: PieceHeader | None) -> PieceHeader:
    """The closing header of a lane; it repeats what the last piece said about whose lane it is."""
    if last is not None:
        return msgspec.structs.replace(last, kind="close", num_bytes=0, checksum=0)
    blank = dict.fromkeys(("run_id", "attachment", "unit", "plan_digest"), "")
    numbers = dict.fromkeys(
        ("incarnation", "version", "attempt", "source", "target", "seq", "num_bytes", "checksum"), 0
    )
    return PieceHeader(kind="close", **blank, **numbers)  # type: ignore[arg-type]
