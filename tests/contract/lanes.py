"""What the contract tests of lanes share: transports by name, pieces, and a sender that lives in its own process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneAddress, LaneError
from megastream.transport import lanes
from megastream.transport.checksum import checksum
from tests.contract import memory
from tests.helpers.forked import PRELOAD, WITHOUT_CUDA, forked
from tests.helpers.ranks import SHARED_GPU

HAS_GPU = torch.cuda.is_available()
TRANSPORTS = ("gloo", memory.TRANSPORT, "ipc", "nccl") if HAS_GPU else ("gloo", memory.TRANSPORT)
"""Those that this machine has; tools/gpu_check.sh runs these tests where there is a GPU."""
HOST = "127.0.0.1"
SEVERAL = tuple(transport for transport in TRANSPORTS if transport != "gloo")
"""Those on which several pieces may be under way."""
WITH_MARKS = [pytest.param(name, marks=pytest.mark.full if name == memory.TRANSPORT else ()) for name in TRANSPORTS]
"""Where there is no GPU, a second transport is much to run for each change."""
SLOT = 1 << 20

processes = forked(WITHOUT_CUDA if HAS_GPU else PRELOAD)


def device_of(transport: str, index: int) -> torch.device:
    """Where this end's payloads lie. With one GPU both ends share it."""
    if transport in ("gloo", memory.TRANSPORT):
        return torch.device("cpu")
    return torch.device("cuda", index % torch.cuda.device_count())


def connect(transport: str, address: LaneAddress, deadline_s: float = 30.0) -> Any:
    _say_host(transport, "sender")
    if address.transport == memory.TRANSPORT:
        return memory.connect(address, deadline_s)
    return lanes.connect(address, deadline_s, device_of(transport, 1))


def receiver(transport: str) -> Any:
    _say_host(transport, "receiver")
    if transport == memory.TRANSPORT:
        return memory.MemoryReceiver(HOST)
    return lanes.Receiver(HOST, transport, device_of(transport, 0))  # type: ignore[arg-type]


def _say_host(transport: str, name: str) -> None:
    """NCCL takes two ranks on one GPU only when they seem to be on different hosts. It shall listen here alone."""
    if transport != "nccl":
        return
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    if torch.cuda.device_count() < 2:
        os.environ.update(SHARED_GPU, NCCL_HOSTID=f"{name}-{os.getpid()}")


def content(seq: int, num_bytes: int, lane: Any = None) -> torch.Tensor:
    """Bytes that tell pieces and positions apart; where the lane wants them."""
    made = ((torch.arange(num_bytes) * 31 + (torch.arange(num_bytes) >> 8) + seq * 7) % 251).to(torch.uint8)
    return ready(made if lane is None else made.to(lane.device))


def room(lane: Any, num_bytes: int, value: int = 255) -> torch.Tensor:
    """Where a lane may write."""
    return ready(torch.full((num_bytes,), value, dtype=torch.uint8, device=lane.device))


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """A lane takes memory whose bytes are there."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return tensor


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
        checksum=checksum(payload.contiguous()) if payload.numel() and "checksum" not in changes else 0,
    )
    return PieceHeader(**{**fields, **changes})


@dataclass
class Sender:
    """A process that connects and runs `script(lane, pipe)`; `pipe` talks to the test."""

    process: Any
    pipe: Any

    def result(self, timeout_s: float = 60.0) -> Any:
        """What the script returned, or the text `ErrorType: message` of what it raised."""
        assert self.pipe.poll(timeout_s), f"the sender said nothing within {timeout_s} s"
        return self.pipe.recv()

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self.pipe.close()


def send(lane: Any, header: PieceHeader, payload: torch.Tensor, deadline_s: float) -> None:
    """One piece, acknowledged."""
    lane.post(header, payload, deadline_s)
    lane.acknowledged(deadline_s)


def take(lane: Any, header: PieceHeader, into: torch.Tensor, deadline_s: float) -> None:
    """The bytes of a header that was read."""
    lane.begin_payload(header, into, deadline_s)
    lane.finish_payload(header, deadline_s)


def receive(lane: Any, deadline_s: float = 30.0) -> tuple[PieceHeader, torch.Tensor]:
    """The next piece, acknowledged."""
    got = lane.receive_header(deadline_s)
    assert got is not None
    into = room(lane, got.num_bytes)
    take(lane, got, into, deadline_s)
    lane.acknowledge(got)
    return got, into.cpu()


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
        payload = content(seq, size, lane)
        send(lane, header(seq, payload), payload, 10.0)
    counters = lane.counters
    return {"pieces": counters.pieces, "payload": counters.payload_bytes, "header": counters.header_bytes}


def say_and_sleep(lane: Any, pipe: Any) -> None:
    pipe.send("ready")
    time.sleep(60)


def post(lane: Any, seq: int, num_bytes: int = SLOT, **changes: Any) -> torch.Tensor:
    """The payload, which must stay until it is acknowledged."""
    payload = content(seq, num_bytes, lane)
    lane.post(header(seq, payload, **changes), payload, 10.0)
    return payload


def outcome(lane: Any, deadline_s: float = 10.0) -> str:
    try:
        lane.acknowledged(deadline_s)
    except (LaneError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def post_many(lane: Any, pipe: Any, count: int) -> list[str]:
    """Keeps the window full."""
    kept, said = [], []
    for seq in range(count):
        if seq >= lane.window:
            said.append(outcome(lane))
        kept.append(post(lane, seq, SLOT + seq))
    return said + [outcome(lane) for _ in range(count - len(said))]


def begin(lane: Any, count: int) -> list[tuple[Any, torch.Tensor]]:
    """Reads so many headers and asks for their bytes."""
    begun = []
    for _ in range(count):
        got = lane.receive_header(10.0)
        begun.append((got, room(lane, got.num_bytes)))
        lane.begin_payload(*begun[-1], 10.0)
    return begun


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
        self.lanes.append(self.receiver.accept(address, 60.0))
        return self.lanes[-1], sender

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        self.receiver.close()
        for sender in self.senders:
            sender.end()
