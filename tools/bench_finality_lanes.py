"""Lanes of bench_finality.py: into nothing, or into processes that check every piece and throw it away."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from megastream.engine.receiving import Receiving
from megastream.engine.settings import EngineSettings
from megastream.protocol.header import HEADER_BYTES, PieceHeader
from megastream.protocol.lane import LaneAddress, LaneCounters, LaneTimeout, SendLane
from megastream.transport.checksum import checksum
from megastream.transport.lanes import Receiver, connect

DEADLINE_S = 120.0
ACCEPT_S = 600.0
"""Models are built one behind the other, and only then connect."""
PIECE_BYTES = 1 << 20
ENGINE_RANKS = 2

Sent = tuple[int, int, float, str, int]
"""(version, attempt, when it had left, unit, bytes) of a piece."""
Addresses = dict[tuple[str, int, int], LaneAddress]
"""By model, trainer rank and engine rank."""


class CountingLane:
    """A lane into nothing: keeps when each piece came and how large it was."""

    device = "cpu"
    window = 1

    def __init__(self) -> None:
        self.counters = LaneCounters()
        self.sent: list[Sent] = []

    def checksum(self, payload: torch.Tensor, stream: Any = None) -> Callable[[], int]:
        return partial(checksum, payload)

    def acknowledged(self, deadline_s: float) -> None: ...

    def post(self, header: PieceHeader, payload: torch.Tensor, deadline_s: float) -> None:
        self.counters.pieces += 1
        self.counters.payload_bytes += payload.numel()
        self.counters.header_bytes += HEADER_BYTES
        self.sent.append((header.version, header.attempt, time.perf_counter(), header.unit, payload.numel()))

    def close(self) -> None: ...


class TimedLane:
    """A real lane that keeps when each piece was acknowledged and how large it was."""

    def __init__(self, lane: SendLane) -> None:
        self._lane = lane
        self._posted: deque[PieceHeader] = deque()
        self.device, self.window, self.counters, self.checksum = lane.device, lane.window, lane.counters, lane.checksum
        self.sent: list[Sent] = []

    def post(self, header: PieceHeader, payload: torch.Tensor, deadline_s: float) -> None:
        self._lane.post(header, payload, deadline_s)
        self._posted.append(header)

    def acknowledged(self, deadline_s: float) -> None:
        self._lane.acknowledged(deadline_s)
        piece = self._posted.popleft()
        self.sent.append((piece.version, piece.attempt, time.perf_counter(), piece.unit, piece.num_bytes))

    def close(self) -> None:
        self._lane.close()


def open_lanes(
    addresses: Addresses, model: str, rank: int, targets: Iterable[int], device: torch.device
) -> dict[int, Any]:
    """For weights on `device`; without addresses into nothing."""
    if not addresses:
        return {target: CountingLane() for target in targets}
    lanes = {target: connect(addresses[model, rank, target], DEADLINE_S, device) for target in sorted(set(targets))}
    return {target: TimedLane(lane) for target, lane in lanes.items()}


class Nowhere:
    def admit(self, header: PieceHeader, source: int) -> bool:
        return True

    def write(self, header: PieceHeader, payload: torch.Tensor) -> None: ...

    def lost(self, header: PieceHeader) -> None: ...

    def settle(self, header: PieceHeader) -> None: ...


def start_receivers(context: Any, transport: str, models: list[str], ranks: int) -> tuple[list[Any], Addresses]:
    """One process per engine rank, each with a lane for every model and trainer rank. End them when all is done.

    With `transport` "count" there is nobody.
    """
    processes: list[Any] = []
    addresses: Addresses = {}
    for target in range(0 if transport == "count" else ENGINE_RANKS):
        here, there = context.Pipe()
        process = context.Process(target=receive_all, args=(transport, target, models, ranks, there), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        addresses |= {(model, rank, target): address for (model, rank), address in here.recv().items()}
    return processes, addresses


def receive_all(transport: Any, target: int, models: list[str], ranks: int, addresses: Connection) -> None:
    """The process of an engine rank: one thread per lane, as in an engine. On a GPU it has one of its own, if any."""
    torch.set_num_threads(1)
    gpu = target % max(torch.cuda.device_count(), 1)
    device = torch.device("cpu") if transport == "gloo" else torch.device("cuda", gpu)
    receiver = Receiver("127.0.0.1", transport, device)
    offered = {
        (model, rank): receiver.address(number * ranks + rank)
        for number, model in enumerate(models)
        for rank in range(ranks)
    }
    addresses.send(offered)
    threads = [threading.Thread(target=receive, args=(receiver, address)) for address in offered.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def receive(receiver: Receiver, address: LaneAddress) -> None:
    try:
        lane = receiver.accept(address, ACCEPT_S)
    except LaneTimeout:
        return  # this trainer rank sends nothing to this engine rank
    Receiving(lane, 0, PIECE_BYTES, Nowhere(), EngineSettings()).run()
    lane.close()
