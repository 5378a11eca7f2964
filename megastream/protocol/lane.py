"""The contract of a lane: one directed, ordered, checked way from a trainer rank to an engine rank.

A transport (room `transport/`) implements both ends. Payloads are 1-D contiguous uint8 torch tensors on the lane's
`device`; their bytes are there when a call gets them, and when it returns. A lane belongs to one thread at a time.
"""

from __future__ import annotations

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
    """The trainer's end."""

    counters: LaneCounters
    device: str
    """Where payloads lie: "cpu", or a GPU as torch names it."""

    def checksum(self, payload: Any) -> int:
        """What the header of a piece with this payload must say, in 64 bits. Blocks until it is known."""

    def send(self, header: PieceHeader, payload: Any, deadline_s: float) -> None:
        """Ships one piece; returns when the receiver has acknowledged that the bytes arrived and their checksum held.

        Blocks while the receiver has no room (backpressure). Raises LaneTimeout after `deadline_s`, LaneError when
        the receiver refused the piece (its reason is in the message) or is gone.
        """

    def close(self) -> None:
        """Sends the closing header when possible and frees everything. Idempotent, never raises for a dead peer."""


class ReceiveLane(Protocol):
    """The engine's end."""

    counters: LaneCounters
    device: str
    """Where `into` must lie: "cpu", or a GPU as torch names it."""

    def receive_header(self, deadline_s: float) -> PieceHeader | None:
        """The next header, or None when the peer closed the lane. LaneTimeout after `deadline_s` without one."""

    def receive_payload(self, header: PieceHeader, into: Any, deadline_s: float) -> None:
        """Fills `into` (at least header.num_bytes bytes) and verifies the checksum; LaneError when it differs."""

    def acknowledge(self, header: PieceHeader, error: str | None = None) -> None:
        """Tells the sender that the piece is in (None) or refused, with the reason."""

    def abort(self) -> None:
        """Unblocks a receive that waits in another thread, which then raises LaneError. Any thread may call it."""

    def close(self) -> None:
        """Frees everything. Idempotent."""
