"""Both ends of one gloo lane. How they come to be: transport/gloo.py.

One piece is under way at a time: gloo's TCP is the bottleneck, not the conversation around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from megastream.protocol.header import HEADER_BYTES, PieceHeader, encode_header
from megastream.protocol.lane import LaneError, LaneTimeout
from megastream.transport.checksum import check_payload, checksum
from megastream.transport.gloo_pair import (
    ACK_TAG,
    PAYLOAD_TAG,
    SENDER,
    TRAILER_TAG,
    GlooPair,
    PairBroken,
    PairTimeout,
    Work,
    wait,
)
from megastream.transport.lane_end import CLOSE_GRACE_S, LaneEnd, closing_header

TRAILER_BYTES = 8
ACK_BYTES = 512

_OK, _REFUSED, _REFUSED_UNREAD = 0, 1, 2


@dataclass(slots=True)
class _Posted:
    header: PieceHeader
    ack: torch.Tensor
    acknowledged: Work
    sent: list[Work]


@dataclass(slots=True)
class _Begun:
    view: torch.Tensor
    trailer: torch.Tensor
    works: list[Work]


class GlooSendLane(LaneEnd[GlooPair]):
    """The trainer's end; see protocol.lane.SendLane. Any failure leaves the lane unusable, except a refusal of a piece
    that the receiver has read."""

    window = 1

    def __init__(self, pair: GlooPair, name: str) -> None:
        super().__init__(pair, name)
        self._last: PieceHeader | None = None
        self._posted: _Posted | None = None

    def checksum(self, payload: torch.Tensor, stream: torch.cuda.Stream | None = None) -> Callable[[], int]:
        value = checksum(payload)
        return lambda: value

    def post(self, header: PieceHeader, payload: torch.Tensor, deadline_s: float) -> None:
        """ValueError before any byte moves when `payload` is not exactly the piece's memory."""
        pair = self._usable()
        what = self._name_of(header)
        if self._posted is not None:
            raise ValueError(f"{what}: piece {self._posted.header.seq} is under way, and this lane carries one")
        check_payload(payload, header.num_bytes, what, self.device)
        self._last = header
        ack = torch.empty(ACK_BYTES, dtype=torch.uint8)
        pair.limit(deadline_s + CLOSE_GRACE_S)
        try:
            acknowledged = pair.post_receive(ack, ACK_TAG)
            sent = [
                pair.post_broadcast(as_bytes(encode_header(header)), SENDER),
                pair.post_send(payload[: header.num_bytes], PAYLOAD_TAG),
                pair.post_send(as_bytes(header.seq.to_bytes(TRAILER_BYTES, "little")), TRAILER_TAG),
            ]
        except PairBroken as error:
            raise self._fail(error, f"announced {self._identify(header)}", deadline_s) from error
        self._posted = _Posted(header, ack, acknowledged, sent)

    def acknowledged(self, deadline_s: float) -> None:
        """Waits on the acknowledgement alone, while it can (gloo_pair says why)."""
        pair = self._usable()
        if (posted := self._posted) is None:
            raise ValueError(f"{self._name}: nothing is under way")
        what = self._identify(posted.header)
        started = time.monotonic()
        try:
            wait(posted.acknowledged, started + deadline_s)
            ack = posted.ack.numpy().tobytes()
            for work in posted.sent if ack[0] != _REFUSED_UNREAD else ():
                wait(work, started + deadline_s)
        except (PairTimeout, PairBroken) as error:
            raise self._fail(error, f"waited for the acknowledgement of {what}", deadline_s) from error
        finally:
            self.counters.wait_s += time.monotonic() - started
        self._posted = None
        self._judge(pair, ack, what)
        self._count(posted.header, HEADER_BYTES + TRAILER_BYTES)

    def _judge(self, pair: GlooPair, ack: bytes, what: str) -> None:
        status = ack[0]
        if status == _OK:
            return
        reason = ack[3 : 3 + int.from_bytes(ack[1:3], "little")].decode(errors="replace")
        message = f"{what} was refused: {reason}"
        if status == _REFUSED_UNREAD:
            # The payload was never asked for and still lies in the group: nothing can follow it.
            self._broken = message
            pair.abort()
        raise LaneError(f"{self._name}: {message}")

    def close(self) -> None:
        pair, self._way = self._way, None
        if pair is None:
            return
        if self._posted is not None:
            self._broken = self._broken or "closed with a piece under way"
        if self._broken is None:
            with suppress(PairTimeout, PairBroken):
                header = encode_header(closing_header(self._last))
                pair.limit(CLOSE_GRACE_S)
                wait(pair.post_broadcast(as_bytes(header), SENDER), time.monotonic() + CLOSE_GRACE_S)
        pair.close()
        self._posted = None


class GlooReceiveLane(LaneEnd[GlooPair]):
    """The engine's end; see protocol.lane.ReceiveLane.

    `receive_header` may time out and be called again. After a wrong checksum `acknowledge(header, error)` still works.
    A refusal before the payload was begun ends the lane: its bytes cannot be skipped.
    """

    window = 1

    def __init__(self, pair: GlooPair, name: str) -> None:
        super().__init__(pair, name)
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._coming: Work | None = None
        self._begun: _Begun | None = None
        self._unread = False
        self._ask()

    def _ask(self) -> Work:
        """Asks for the next header, so that it (and a closing one) can come at any time."""
        if self._coming is None:
            self._coming = self._usable().post_broadcast(self._header, SENDER)
        return self._coming

    def receive_header(self, deadline_s: float) -> PieceHeader | None:
        self._usable()
        started = time.monotonic()
        try:
            wait(self._ask(), started + deadline_s)
        except PairTimeout as error:
            raise LaneTimeout(f"{self._name}: no header came within {deadline_s:.1f} s") from error
        except PairBroken as error:
            raise self._fail(error, "waited for a header", deadline_s) from error
        finally:
            self.counters.wait_s += time.monotonic() - started
        self._coming = None
        header = self._read(self._header.numpy().tobytes())
        self._unread = header is not None
        return header

    def has_header(self) -> bool:
        self._usable()
        return bool(self._ask().is_completed())

    def begin_payload(self, header: PieceHeader, into: torch.Tensor, deadline_s: float) -> None:
        pair = self._usable()
        what = self._identify(header)
        check_payload(into, header.num_bytes, self._name_of(header), self.device)
        view, trailer = into[: header.num_bytes], torch.empty(TRAILER_BYTES, dtype=torch.uint8)
        try:
            works = [pair.post_receive(view, PAYLOAD_TAG), pair.post_receive(trailer, TRAILER_TAG)]
        except PairBroken as error:
            raise self._fail(error, f"asked for the bytes of {what}", deadline_s) from error
        self._unread = False
        self._begun = _Begun(view, trailer, works)

    def finish_payload(self, header: PieceHeader, deadline_s: float) -> None:
        self._usable()
        what = self._identify(header)
        if (begun := self._begun) is None:
            raise ValueError(f"{self._name}, {what}: its payload was not begun")
        started = time.monotonic()
        try:
            for work in reversed(begun.works):  # the trailer first: gloo_pair says why
                wait(work, started + deadline_s)
        except (PairTimeout, PairBroken) as error:
            raise self._fail(error, f"waited for the bytes of {what}", deadline_s) from error
        finally:
            self.counters.wait_s += time.monotonic() - started
        self._begun = None
        seq = int.from_bytes(begun.trailer.numpy().tobytes(), "little")
        if seq != header.seq:
            self._broken = f"{what} ended with the trailer of piece {seq}"
            raise LaneError(f"{self._name}: {self._broken}")
        self._verify(header, checksum(begun.view))
        self._count(header, HEADER_BYTES + TRAILER_BYTES)

    def acknowledge(self, header: PieceHeader, error: str | None = None) -> None:
        pair = self._usable()
        status = _OK if error is None else _REFUSED_UNREAD if self._unread else _REFUSED
        text = (error or "").encode()[: ACK_BYTES - 3]
        raw = (bytes([status]) + len(text).to_bytes(2, "little") + text).ljust(ACK_BYTES, b"\0")
        try:
            if status != _REFUSED_UNREAD:
                self._ask()
            wait(pair.post_send(as_bytes(raw), ACK_TAG), time.monotonic() + CLOSE_GRACE_S)
        except (PairTimeout, PairBroken) as failure:
            raise self._fail(failure, f"acknowledged piece {header.seq}", CLOSE_GRACE_S) from failure
        if status == _REFUSED_UNREAD:
            self._broken = f"refused piece {header.seq} unread: {error}"

    def abort(self) -> None:
        pair = self._way
        if pair is not None:
            self._broken = self._broken or "aborted"
            pair.abort()

    def close(self) -> None:
        pair, self._way = self._way, None
        self._coming = self._begun = None
        if pair is not None:
            pair.close()


def as_bytes(raw: bytes) -> torch.Tensor:
    """A CPU tensor over a copy of these bytes."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
