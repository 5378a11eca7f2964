"""Both ends of a lane whose messages go over a wire, and whose bytes go some other way (ipc.py, nccl.py).

To the engine goes each piece's header, and behind it the outlet's `place`. Back come answers: "go", where bytes need
the receiver's word, and an acknowledgement with the piece's number. Headers go ahead while the bytes of earlier pieces
move, and the engine checks one piece beside the copy of the next, on streams of their own.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from megastream.protocol.header import HEADER_BYTES, PieceHeader, encode_header
from megastream.protocol.lane import LaneError, LaneTimeout
from megastream.transport.checksum import Sum, Summing, check_payload
from megastream.transport.gloo_pair import PairBroken, PairTimeout
from megastream.transport.lane_end import CLOSE_GRACE_S, LaneEnd, closing_header
from megastream.transport.wire import Check, Wire, tries

WINDOW = 8
"""Pieces under way, if the trainer has as many slots. The engine makes buffers as it needs them."""

_ANSWER = struct.Struct("<BQH")
"""What, the piece's number, and the length of the text behind it."""
_GO, _OK, _REFUSED = 0, 1, 2
_TEXT_BYTES = 1000


class Outlet(Protocol):
    """How bytes leave the trainer. All may raise PairTimeout and PairBroken."""

    place_bytes: int

    def place(self, payload: torch.Tensor) -> bytes:
        """What the receiver must know beforehand, in `place_bytes` bytes."""

    def go(self, payload: torch.Tensor, check: Check, until: float) -> None:
        """The receiver has said "go": begins to send, in the order of the calls."""

    def settle(self, check: Check, until: float) -> None:
        """The receiver has the oldest payload; returns when its memory is free on this side, too."""

    def stop(self) -> None:
        """Gives up what is under way. Idempotent."""

    def close(self) -> None:
        """Frees everything. Idempotent."""


class Intake(Protocol):
    """How bytes come to the engine."""

    place_bytes: int
    says_go: bool

    def take(self, place: bytes, into: torch.Tensor, check: Check, until: float) -> torch.cuda.Event | None:
        """Enqueues the filling of `into`, in the order of the calls; the event is behind it."""

    def look(self) -> None:
        """Raises what has become of the transfers that are under way."""

    def stop(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Posted:
    header: PieceHeader
    payload: torch.Tensor
    gone: bool = False


class WireSendLane(LaneEnd[Wire]):
    """The trainer's end; see protocol.lane.SendLane. Any failure but a refusal leaves the lane unusable."""

    window = WINDOW

    def __init__(self, wire: Wire, name: str, device: torch.device, outlet: Outlet) -> None:
        super().__init__(wire, name, str(device))
        self._outlet, self._sums = outlet, Summing(device)
        self._under_way: deque[_Posted] = deque()
        self._last: PieceHeader | None = None

    def checksum(self, payload: torch.Tensor, stream: torch.cuda.Stream | None = None) -> Callable[[], int]:
        if stream is None and payload.is_cuda:
            stream = torch.cuda.current_stream(payload.device)
        return self._sums.begin(payload, stream).value

    def post(self, header: PieceHeader, payload: torch.Tensor, deadline_s: float) -> None:
        """ValueError before any byte moves when `payload` is not exactly the piece's memory."""
        wire = self._usable()
        what = self._name_of(header)
        if len(self._under_way) >= self.window:
            raise ValueError(f"{what}: {self.window} pieces are under way already; wait for an acknowledgement first")
        check_payload(payload, header.num_bytes, what, self.device)
        view = payload if payload.numel() == header.num_bytes else payload[: header.num_bytes]
        message = encode_header(header) + self._outlet.place(view)
        self._last = header
        self._under_way.append(_Posted(header, view))
        try:
            wire.send(message, time.monotonic() + deadline_s)
        except PairTimeout as error:
            raise self._fail(error, f"announced {self._identify(header)}", deadline_s) from error
        except PairBroken:
            pass  # `acknowledged` meets it, behind the answers that came before: one of them may say why

    def acknowledged(self, deadline_s: float) -> None:
        wire = self._usable()
        if not self._under_way:
            raise ValueError(f"{self._name}: nothing is under way")
        oldest = self._under_way[0].header
        what = self._identify(oldest)
        started = time.monotonic()
        try:
            refusal = self._await_answer(wire, oldest, started + deadline_s)
        except (PairTimeout, PairBroken) as error:
            self._outlet.stop()
            raise self._fail(error, f"waited for the acknowledgement of {what}", deadline_s) from error
        finally:
            self.counters.wait_s += time.monotonic() - started
        self._under_way.popleft()
        if refusal is not None:
            raise LaneError(f"{self._name}: {what} was refused: {refusal}")
        self._count(oldest, HEADER_BYTES + self._outlet.place_bytes)

    def _await_answer(self, wire: Wire, oldest: PieceHeader, until: float) -> str | None:
        """The reason of a refusal; None for an acknowledgement. Meanwhile bytes go, as the receiver asks for them."""

        def check() -> None:
            if self._broken or wire.is_gone():
                raise PairBroken(self._broken or "its connection is closed")

        while True:
            kind, seq, length = _ANSWER.unpack(wire.receive(_ANSWER.size, until))
            text = wire.receive(length, until).decode(errors="replace") if length else ""
            if kind != _GO and seq == oldest.seq:
                break
            asked = next((each for each in self._under_way if not each.gone and each.header.seq == seq), None)
            if kind != _GO or asked is None:
                raise PairBroken(f"it answered {kind} about piece {seq}")
            asked.gone = True
            self._outlet.go(asked.payload, check, until)
        if self._under_way[0].gone:
            self._outlet.settle(check, until)
        return text if kind == _REFUSED else None

    def close(self) -> None:
        wire, self._way = self._way, None
        if wire is None:
            return
        if self._broken is None and not self._under_way:
            with suppress(PairTimeout, PairBroken):
                wire.send(self._closing(), time.monotonic() + CLOSE_GRACE_S)
        if self._under_way:
            self._broken = self._broken or "closed with pieces under way"
            wire.shut()  # wakes a thread that waits for an acknowledgement
        wire.close()
        self._outlet.close()
        self._sums.close()

    def _closing(self) -> bytes:
        return encode_header(closing_header(self._last)) + bytes(self._outlet.place_bytes)


@dataclass(slots=True)
class _Begun:
    header: PieceHeader
    sum: Sum


class WireReceiveLane(LaneEnd[Wire]):
    """The engine's end; see protocol.lane.ReceiveLane. A refusal leaves the lane usable, also of a piece unread."""

    window = WINDOW

    def __init__(self, wire: Wire, name: str, device: torch.device, intake: Intake) -> None:
        super().__init__(wire, name, str(device))
        self._intake, self._sums = intake, Summing(device)
        self._checking = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._place = b""
        self._begun: deque[_Begun] = deque()

    def receive_header(self, deadline_s: float) -> PieceHeader | None:
        """May time out and be called again."""
        wire = self._usable()
        started = time.monotonic()
        try:
            raw = wire.receive(HEADER_BYTES + self._intake.place_bytes, started + deadline_s)
        except PairTimeout as error:
            raise LaneTimeout(f"{self._name}: no header came within {deadline_s:.1f} s") from error
        except PairBroken as error:
            raise self._fail(error, "waited for a header", deadline_s) from error
        finally:
            self.counters.wait_s += time.monotonic() - started
        self._place = raw[HEADER_BYTES:]
        return self._read(raw[:HEADER_BYTES])

    def has_header(self) -> bool:
        return self._usable().has_message()

    def begin_payload(self, header: PieceHeader, into: torch.Tensor, deadline_s: float) -> None:
        wire = self._usable()
        what = self._identify(header)
        check_payload(into, header.num_bytes, self._name_of(header), self.device)
        view = into[: header.num_bytes]
        until = time.monotonic() + deadline_s
        try:
            if self._intake.says_go:
                wire.send(_ANSWER.pack(_GO, header.seq, 0), until)
            came = self._intake.take(self._place, view, self._check, until)
        except (PairTimeout, PairBroken) as error:
            self._intake.stop()
            raise self._fail(error, f"asked for the bytes of {what}", deadline_s) from error
        if came is not None and self._checking is not None:
            self._checking.wait_event(came)
        self._begun.append(_Begun(header, self._sums.begin(view, self._checking)))

    def finish_payload(self, header: PieceHeader, deadline_s: float) -> None:
        self._usable()
        what = self._identify(header)
        if not self._begun or self._begun[0].header is not header:
            raise ValueError(f"{self._name}, {what}: it is not the oldest payload that was begun")
        begun = self._begun[0]
        started = time.monotonic()
        try:
            self._await(begun.sum, started + deadline_s)
        except (PairTimeout, PairBroken) as error:
            self._intake.stop()
            raise self._fail(error, f"waited for the bytes of {what}", deadline_s) from error
        finally:
            self.counters.wait_s += time.monotonic() - started
        self._begun.popleft()
        self._verify(header, begun.sum.value())
        self._count(header, HEADER_BYTES + self._intake.place_bytes)

    def _await(self, sum_: Sum, until: float) -> None:
        for _ in tries(until):
            if sum_.is_known():
                return
            self._check()
            self._intake.look()
        raise PairTimeout("the bytes were not there at the deadline")

    def _check(self) -> None:
        wire = self._way
        if self._broken or wire is None or wire.is_gone():  # aborted by another thread, or the peer died
            raise PairBroken(self._broken or "its connection is closed")

    def acknowledge(self, header: PieceHeader, error: str | None = None) -> None:
        wire = self._usable()
        text = (error or "").encode()[:_TEXT_BYTES]
        answer = _ANSWER.pack(_OK if error is None else _REFUSED, header.seq, len(text)) + text
        try:
            wire.send(answer, time.monotonic() + CLOSE_GRACE_S)
        except (PairTimeout, PairBroken) as failure:
            raise self._fail(failure, f"acknowledged piece {header.seq}", CLOSE_GRACE_S) from failure

    def abort(self) -> None:
        wire = self._way
        if wire is not None:
            self._broken = self._broken or "aborted"
            wire.shut()

    def close(self) -> None:
        wire, self._way = self._way, None
        if wire is not None:
            wire.close()
            self._intake.close()
            self._sums.close()
