"""What the contract tests of lanes share: transports by name, pieces, and a sender that lives in its own process."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneAddress
from megastream.transport.checksum import checksum
from tests.helpers.forked import forked

TRANSPORTS = {"gloo": "megastream.transport.gloo"}
RECEIVERS = {"gloo": "GlooReceiver"}
HOST = "127.0.0.1"
SLOT = 1 << 20

processes = forked()


def connect(transport: str, address: LaneAddress, deadline_s: float = 10.0) -> Any:
    return importlib.import_module(TRANSPORTS[transport]).connect(address, deadline_s)


def receiver(transport: str) -> Any:
    return getattr(importlib.import_module(TRANSPORTS[transport]), RECEIVERS[transport])(HOST)


def content(seq: int, num_bytes: int) -> torch.Tensor:
    """Bytes that tell pieces and positions apart."""
    return ((torch.arange(num_bytes) * 31 + (torch.arange(num_bytes) >> 8) + seq * 7) % 251).to(torch.uint8)


def header(seq: int, payload: torch.Tensor, **changes: Any) -> PieceHeader:
    fields: dict[str, Any] = dict(
        kind="piece",
        run_id="run",
        incarnation=1,
        attachment="a1",
        version=7,
        attempt=0,
        unit="s0.l3.e0:8",
        plan_digest="d",
        source=3,
        target=1,
        seq=seq,
        num_bytes=payload.numel(),
        checksum=checksum(payload.contiguous()) if payload.numel() else 0,
    )
    return PieceHeader(**{**fields, **changes})


@dataclass
class Sender:
    """A process that connects and runs `script(lane, pipe)`; `pipe` talks to the test."""

    process: Any
    pipe: Any

    def result(self, timeout_s: float = 20.0) -> Any:
        """What the script returned, or the text `ErrorType: message` of what it raised."""
        assert self.pipe.poll(timeout_s), f"the sender said nothing within {timeout_s} s"
        return self.pipe.recv()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.pipe.close()


def receive(lane: Any, deadline_s: float = 10.0) -> tuple[PieceHeader, torch.Tensor]:
    """The next piece, acknowledged."""
    got = lane.receive_header(deadline_s)
    assert got is not None
    into = torch.full((got.num_bytes,), 255, dtype=torch.uint8)
    lane.receive_payload(got, into, deadline_s)
    lane.acknowledge(got)
    return got, into


def start_sender(transport: str, address: LaneAddress, script: Callable[..., Any], *args: Any) -> Sender:
    ours, theirs = processes.Pipe()
    process = processes.Process(target=_sender, args=(transport, address, script, theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return Sender(process, ours)


def _sender(transport: str, address: LaneAddress, script: Callable[..., Any], pipe: Any, *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        lane = connect(transport, address)
        result = script(lane, pipe, *args)
        lane.close()
    except (RuntimeError, ValueError) as error:
        result = f"{type(error).__name__}: {error}"
    pipe.send(result)


def send_sizes(lane: Any, pipe: Any, sizes: list[int]) -> dict[str, int]:
    for seq, size in enumerate(sizes):
        payload = content(seq, size)
        lane.send(header(seq, payload), payload, 10.0)
    counters = lane.counters
    return {"pieces": counters.pieces, "payload": counters.payload_bytes, "header": counters.header_bytes}


def say_and_sleep(lane: Any, pipe: Any) -> None:
    pipe.send("ready")
    time.sleep(60)


class Link:
    """The receiving end in this process and the senders it is connected to."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.receiver: Any = receiver(transport)
        self.lanes: list[Any] = []
        self.senders: list[Any] = []

    def open(self, script: Callable[..., Any], *args: Any, source: int = 3) -> tuple[Any, Any]:
        address = self.receiver.address(source)
        sender = start_sender(self.transport, address, script, *args)
        self.senders.append(sender)
        self.lanes.append(self.receiver.accept(address, 20.0))
        return self.lanes[-1], sender

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        self.receiver.close()
        for sender in self.senders:
            sender.end()
