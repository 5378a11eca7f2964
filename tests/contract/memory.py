"""A lane like those of GPUs, without one: messages over a wire, bytes through files in memory, written at "go"."""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from pathlib import Path

import torch

from megastream.protocol.lane import LaneAddress
from megastream.transport import gloo, wire
from megastream.transport.gloo_pair import GlooPair, PairTimeout
from megastream.transport.lanes import Verdict, hear, open_wire
from megastream.transport.wire import Check, tries
from megastream.transport.wire_lane import WireReceiveLane, WireSendLane

TRANSPORT = "memory"
CPU = torch.device("cpu")
PLACE = struct.Struct("<QQ")
"""Whose file, and its number there: it goes when the sender does."""


class MemoryOutlet:
    place_bytes = PLACE.size

    def __init__(self) -> None:
        self._posted: dict[int, int] = {}
        self._sent: deque[int] = deque()

    def place(self, payload: torch.Tensor) -> bytes:
        number = self._posted[id(payload)] = os.memfd_create("piece")
        return PLACE.pack(os.getpid(), number)

    def go(self, payload: torch.Tensor, check: Check, until: float) -> None:
        self._sent.append(self._posted.pop(id(payload)))
        with open(self._sent[-1], "wb", closefd=False) as file:
            file.write(payload.numpy().data)

    def settle(self, check: Check, until: float) -> None:
        os.close(self._sent.popleft())

    def stop(self) -> None: ...

    def close(self) -> None:
        for number in (*self._posted.values(), *self._sent):
            os.close(number)
        self._posted.clear()
        self._sent.clear()


class MemoryIntake:
    place_bytes = PLACE.size
    says_go = True

    def take(self, place: bytes, into: torch.Tensor, check: Check, until: float) -> None:
        owner, number = PLACE.unpack(place)
        path = Path(f"/proc/{owner}/fd/{number}")
        for _ in tries(until):
            try:
                if path.stat().st_size == into.numel():
                    into.copy_(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
                    return
            except OSError:
                pass  # its owner is gone, or closes: the check says so
            check()
        raise PairTimeout("no bytes")

    def look(self) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class MemoryReceiver(gloo.GlooReceiver):
    transport = TRANSPORT

    def _lane(self, pair: GlooPair, name: str, until: float) -> WireReceiveLane:  # type: ignore[override]
        connection = open_wire(pair, self._host, Verdict(transport=TRANSPORT), until)
        return WireReceiveLane(connection, name, CPU, MemoryIntake())


def connect(address: LaneAddress, deadline_s: float) -> WireSendLane:
    until = time.monotonic() + deadline_s
    pair = gloo.meet(address, deadline_s)
    verdict = hear(pair, Verdict, until)
    connection = wire.dial(address.host, verdict.port, verdict.token, until)
    pair.close()
    return WireSendLane(connection, gloo.name_of(address), CPU, MemoryOutlet())
