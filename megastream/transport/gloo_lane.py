"""Both ends of one gloo lane. How they come to be: transport/gloo.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import torch

from megastream.protocol.header import HEADER_BYTES, HeaderError, PieceHeader, decode_header, encode_header
from megastream.protocol.lane import LaneCounters, LaneError, LaneTimeout
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

TRAILER_BYTES = 8
ACK_BYTES = 512
CLOSE_GRACE_S = 2.0
"""How long a closing sender waits for the receiver to take its closing header, and an acknowledgement may take."""

_OK, _REFUSED, _REFUSED_UNREAD = 0, 1, 2


class _Lane:
    """What both ends share: the group, its name in messages, and the reason once it is broken."""

    device = "cpu"

    def __init__(self, pair: GlooPair, name: str) -> None:
        self.counters = LaneCounters()
        self._hash: Callable[[torch.Tensor], int] = checksum
        self._pair: GlooPair | None = pair
        self._name = name
        self._broken: str | None = None

    def _usable(self) -> GlooPair:
        pair = self._pair
        if pair is None:
            raise LaneError(f"{self._name}: closed")
        if self._broken is not None:
            raise LaneError(f"{self._name}: {self._broken}")
        return pair

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


class GlooSendLane(_Lane):
    """The trainer's end; see protocol.lane.SendLane. Any failed send leaves the lane unusable, except a refusal of a
    piece that the receiver has read."""

    def __init__(self, pair: GlooPair, name: str) -> None:
        super().__init__(pair, name)
        self._last: PieceHeader | None = None

    def checksum(self, payload: torch.Tensor) -> int:
        return self._hash(payload)

    def send(self, header: PieceHeader, payload: torch.Tensor, deadline_s: float) -> None:
        """ValueError before any byte moves when `payload` is not exactly the piece's memory."""
        pair = self._usable()
        what = self._identify(header)
        check_payload(payload, header.num_bytes, f"{self._name}, {what}", self.device)
        self._last = header
        started = time.monotonic()
        try:
            ack = self._ship(pair, header, payload[: header.num_bytes], started + deadline_s)
        except (PairTimeout, PairBroken) as error:
            raise self._fail(error, f"waited for the acknowledgement of {what}", deadline_s) from error
        finally:
            self.counters.wait_s += time.monotonic() - started
        self._judge(pair, ack, what)
        self.counters.pieces += 1
        self.counters.payload_bytes += header.num_bytes
        self.counters.header_bytes += HEADER_BYTES + TRAILER_BYTES

    def _ship(self, pair: GlooPair, header: PieceHeader, payload: torch.Tensor, until: float) -> bytes:
        """Posts everything, then waits on the acknowledgement alone (gloo_pair says why). The acknowledgement."""
        ack = torch.empty(ACK_BYTES, dtype=torch.uint8)
        pair.limit(max(until - time.monotonic(), 0.0) + CLOSE_GRACE_S)
        acknowledged = pair.post_receive(ack, ACK_TAG)
        sent = [
            pair.post_broadcast(as_bytes(encode_header(header)), SENDER),
            pair.post_send(self._in_group(payload), PAYLOAD_TAG),
            pair.post_send(as_bytes(header.seq.to_bytes(TRAILER_BYTES, "little")), TRAILER_TAG),
        ]
        wait(acknowledged, until)
        raw = ack.numpy().tobytes()
        if raw[0] != _REFUSED_UNREAD:
            for work in sent:
                wait(work, until)
        return raw

    def _in_group(self, payload: torch.Tensor) -> torch.Tensor:
        """What goes through the group in the payload's place: the payload, unless bytes go another way."""
        return payload

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
        pair, self._pair = self._pair, None
        if pair is None:
            return
        if self._broken is None:
            with suppress(PairTimeout, PairBroken):
                header = encode_header(_closing(self._last))
                pair.limit(CLOSE_GRACE_S)
                wait(pair.post_broadcast(as_bytes(header), SENDER), time.monotonic() + CLOSE_GRACE_S)
        pair.close()


class GlooReceiveLane(_Lane):
    """The engine's end; see protocol.lane.ReceiveLane.

    `receive_header` may time out and be called again. After a wrong checksum `acknowledge(header, error)` still works.
    """

    def __init__(self, pair: GlooPair, name: str) -> None:
        super().__init__(pair, name)
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._coming: Work | None = None
        self._unread = False
        self._ask()

    def _ask(self) -> None:
        """Asks for the next header, so that it (and a closing one) can come at any time."""
        if self._pair is not None and self._coming is None:
            self._coming = self._pair.post_broadcast(self._header, SENDER)

    def receive_header(self, deadline_s: float) -> PieceHeader | None:
        self._usable()
        started = time.monotonic()
        try:
            self._ask()
            assert self._coming is not None
            wait(self._coming, started + deadline_s)
        except PairTimeout as error:
            raise LaneTimeout(f"{self._name}: no header came within {deadline_s:.1f} s") from error
        except PairBroken as error:
            raise self._fail(error, "waited for a header", deadline_s) from error
        finally:
            self.counters.wait_s += time.monotonic() - started
        self._coming = None
        try:
            header = decode_header(self._header.numpy().tobytes())
        except HeaderError as error:
            self._broken = str(error)
            raise LaneError(f"{self._name}: {error}") from error
        if header.kind == "close":
            self._broken = "the sender closed the lane"
            return None
        self._identify(header)
        self._unread = True
        return header

    def receive_payload(self, header: PieceHeader, into: torch.Tensor, deadline_s: float) -> None:
        pair = self._usable()
        what = self._identify(header)
        check_payload(into, header.num_bytes, f"{self._name}, {what}", self.device)
        view = into[: header.num_bytes]
        started = time.monotonic()
        try:
            seq = self._take(pair, view, started + deadline_s)
        except (PairTimeout, PairBroken) as error:
            raise self._fail(error, f"waited for the bytes of {what}", deadline_s) from error
        finally:
            self.counters.wait_s += time.monotonic() - started
        self._unread = False
        self._verify(header, view, seq, what)
        self.counters.pieces += 1
        self.counters.payload_bytes += header.num_bytes
        self.counters.header_bytes += HEADER_BYTES + TRAILER_BYTES

    def _take(self, pair: GlooPair, into: torch.Tensor, until: float) -> int:
        """Fills `into` and returns the sequence number in the trailer. PairTimeout, PairBroken."""
        trailer = torch.empty(TRAILER_BYTES, dtype=torch.uint8)
        works = [pair.post_receive(into, PAYLOAD_TAG), pair.post_receive(trailer, TRAILER_TAG)]
        for work in reversed(works):  # the trailer first: gloo_pair says why
            wait(work, until)
        return int.from_bytes(trailer.numpy().tobytes(), "little")

    def _verify(self, header: PieceHeader, view: torch.Tensor, seq: int, what: str) -> None:
        if seq != header.seq:
            self._broken = f"{what} ended with the trailer of piece {seq}"
            raise LaneError(f"{self._name}: {self._broken}")
        found = self._hash(view)
        if found != header.checksum:
            raise LaneError(
                f"{self._name}: {what}: checksum {found:016x} of {header.num_bytes} bytes, sent {header.checksum:016x}"
            )

    def acknowledge(self, header: PieceHeader, error: str | None = None) -> None:
        """A refusal before the payload was read ends the lane: its bytes cannot be skipped."""
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
        pair = self._pair
        if pair is not None:
            self._broken = self._broken or "aborted"
            pair.abort()

    def close(self) -> None:
        pair, self._pair = self._pair, None
        self._coming = None
        if pair is not None:
            pair.close()


def as_bytes(raw: bytes) -> torch.Tensor:
    """A CPU tensor over a copy of these bytes."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _closing(last: PieceHeader | None) -> PieceHeader:
    """The closing header of a lane; it repeats what the last piece said about whose lane it is."""
    if last is not None:
        return msgspec.structs.replace(last, kind="close", num_bytes=0, checksum=0)
    blank = dict.fromkeys(("run_id", "attachment", "unit", "plan_digest"), "")
    numbers = dict.fromkeys(
        ("incarnation", "version", "attempt", "source", "target", "seq", "num_bytes", "checksum"), 0
    )
    return PieceHeader(kind="close", **blank, **numbers)  # type: ignore[arg-type]
