"""The contract of a lane: one directed, ordered, checked way from a trainer rank to an engine rank.

A transport (room `transport/`) implements both ends. Payloads are 1-D contiguous uint8 torch tensors on the lane's
`device`; their bytes are there when a call gets them, and when it returns.

Several pieces may be under way: posted, not acknowledged, at most `window`. Everything keeps the order of the posts:
headers, bytes, acknowledgements. What a sender posted keeps its memory until its acknowledgement; a receiver that
begins no payload holds the sender up (backpressure).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megastream.protocol.header import PieceHeader


class LaneError(RuntimeError):
    """The lane is unusable: the peer is gone, a deadline passed, or a checksum differs. Names source and target."""


class LaneTimeout(LaneError):
    """A wait reached its deadline. The message says who waited for whom, for what and how long."""


@dataclass(frozen=True, slots=True)
class LaneAddress:
    """How to find the other end; made by the receiving side, sent through the control plane. Plain text."""

    transport: str
    host: str
    port: int
    key: str


@dataclass(slots=True)
class LaneCounters:
    """Bytes that went through this end, counted at the transport."""

    pieces: int = 0
    payload_bytes: int = 0
    header_bytes: int = 0
    wait_s: float = 0.0


class SendLane(Protocol):
    """The trainer's end. Belongs to one thread at a time; `checksum` may be called by others."""

    counters: LaneCounters
    """Of acknowledged pieces."""
    device: str
    """Where payloads lie: "cpu", or a GPU as torch names it."""
    window: int
    """Pieces that may be under way."""

    def checksum(self, payload: Any, stream: Any = None) -> Callable[[], int]:
        """Begins what the header of a piece with this payload must say, 64 bits; the result blocks until it is known.

        On a GPU behind what `stream` (of torch; else the current one) holds by now, and to be asked once.
        """

    def post(self, header: PieceHeader, payload: Any, deadline_s: float) -> None:
        """Announces one piece and does not wait for the receiver. ValueError when `window` pieces are under way.

        LaneTimeout after `deadline_s`; a receiver that is gone may show in the acknowledgement only.
        """

    def acknowledged(self, deadline_s: float) -> None:
        """Blocks until the receiver acknowledges the oldest piece under way: its bytes are there, their checksum held.

        Raises LaneTimeout after `deadline_s`, LaneError when the receiver refused this piece (its reason is in the
        message; those behind it are not touched) or is gone. ValueError when nothing is under way.
        """

    def close(self) -> None:
        """Sends the closing header when possible and frees everything. Idempotent, never raises for a dead peer.

        With pieces under way it breaks the lane off instead, and the receiver's next call says that the peer is gone.
        """


class ReceiveLane(Protocol):
    """The engine's end. Belongs to one thread at a time, except `abort`."""

    counters: LaneCounters
    device: str
    """Where `into` must lie: "cpu", or a GPU as torch names it."""
    window: int
    """Pieces that a sender may have under way."""

    def receive_header(self, deadline_s: float) -> PieceHeader | None:
        """The next header, or None when the peer closed the lane. LaneTimeout after `deadline_s` without one."""

    def has_header(self) -> bool:
        """`receive_header` would not have to wait long."""

    def begin_payload(self, header: PieceHeader, into: Any, deadline_s: float) -> None:
        """Asks for the bytes of the header that was read last, to be written into `into` (at least so many bytes)."""

    def finish_payload(self, header: PieceHeader, deadline_s: float) -> None:
        """Blocks until the bytes of the oldest payload begun are there; LaneError when their checksum differs."""

    def acknowledge(self, header: PieceHeader, error: str | None = None) -> None:
        """Tells the sender that the oldest piece is in (None) or refused, with the reason."""

    def abort(self) -> None:
        """Unblocks a call that waits in another thread, which then raises LaneError. Any thread may call it."""

    def close(self) -> None:
        """Frees everything. Idempotent."""
