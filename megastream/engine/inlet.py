"""The lanes of one attachment on one engine rank: one receiving thread each, all feeding one sink."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Protocol

import torch

from megastream.engine.settings import EngineSettings
from megastream.plan.types import Plan
from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneAddress, LaneCounters, LaneError, ReceiveLane
from megastream.protocol.staging import PieceRefused

logger = logging.getLogger(__name__)


class LaneReceiver(Protocol):
    """A transport's receiving end on one engine rank; makes one lane per trainer rank."""

    def address(self, source: int) -> LaneAddress:
        """A fresh address for the next lane from this trainer rank."""

    def accept(self, address: LaneAddress, deadline_s: float) -> ReceiveLane:
        """Waits until the trainer rank has connected to this address."""

    def withdraw(self, address: LaneAddress) -> None:
        """Makes this address void, and ends an `accept` that waits for it. Any thread."""


class Sink(Protocol):
    """Where pieces go. Called by several lanes' threads at once."""

    def admit(self, header: PieceHeader, source: int) -> bool:
        """Blocks until there is room. False: receive and throw away. PieceRefused by name."""

    def write(self, header: PieceHeader, payload: torch.Tensor) -> None:
        """The bytes of an admitted piece are here and their checksum held."""

    def lost(self, header: PieceHeader) -> None:
        """The bytes of an admitted piece did not come."""

    def settle(self, header: PieceHeader) -> None:
        """The piece is acknowledged. May take long: prepares a version that is complete."""


@contextmanager
def _own_stream(*devices: torch.device) -> Iterator[None]:
    """This thread's work on a GPU goes beside the engine's steps."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    with torch.cuda.stream(torch.cuda.Stream(gpu)) if gpu is not None else nullcontext():
        yield


class Inlet:
    """Opens lanes and receives until the trainer closes them. The first lane that breaks calls `failed` with why."""

    def __init__(
        self,
        receiver: LaneReceiver,
        plan: Plan,
        rank: int,
        sink: Sink,
        settings: EngineSettings,
        failed: Callable[[str], None],
    ) -> None:
        self._receiver, self._sink, self._settings, self._failed = receiver, sink, settings, failed
        self._who = f"engine rank {rank}"
        self._most_bytes: dict[int, int] = {}
        for piece in plan.by_target.get(rank, ()):
            self._most_bytes[piece.source] = max(piece.num_bytes, self._most_bytes.get(piece.source, 0))
        self._lock = threading.Lock()
        self._addresses: dict[int, LaneAddress] = {}
        self._lanes: dict[int, ReceiveLane] = {}
        self._aborted = False
        self._threads: list[threading.Thread] = []
        self.counters: dict[int, LaneCounters] = {}

    @property
    def sources(self) -> Iterable[int]:
        """Trainer ranks that send to this rank."""
        return self._most_bytes

    @property
    def num_bytes(self) -> int:
        """Payload and headers that came over all lanes so far. Any thread."""
        with self._lock:
            counters = list(self.counters.values())
        return sum(counter.payload_bytes + counter.header_bytes for counter in counters)

    def addresses(self) -> dict[int, LaneAddress]:
        """One address per source, for the Bound record."""
        self._addresses = {source: self._receiver.address(source) for source in self.sources}
        return dict(self._addresses)

    def open(self) -> None:
        """Starts the receiving threads, once the addresses were made. Returns at once."""
        for source in self.sources:
            thread = threading.Thread(
                target=self._run, args=(source,), name=f"megastream-lane-{source}-{self._who}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def abort(self) -> None:
        """Unblocks every thread. Any thread may call it; nothing is reported as failed afterwards."""
        with self._lock:
            self._aborted = True
            lanes = dict(self._lanes)
        for source, address in self._addresses.items():
            if source not in lanes:
                self._receiver.withdraw(address)
        for lane in lanes.values():
            lane.abort()

    def join(self, deadline_s: float) -> None:
        """Waits until every lane is closed, at most so long for each."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline_s)

    def _run(self, source: int) -> None:
        reason = "its thread broke off, the traceback is on stderr"
        try:
            self._receive_all(source)
            reason = ""
        except (RuntimeError, ValueError) as error:  # LaneError, PieceRefused, LiveModelError, torch
            reason = str(error)
        finally:  # whatever ended it: a lane that is no longer read must not be waited for
            if reason and not self._aborted:
                logger.warning("%s: lane from trainer rank %d broke: %s", self._who, source, reason)
                self._failed(reason)

    def _receive_all(self, source: int) -> None:
        lane = self._receiver.accept(self._addresses[source], self._settings.bind_s)
        try:
            if not self._adopt(source, lane):
                return
            scratch = torch.empty(self._most_bytes[source], dtype=torch.uint8, device=lane.device)
            with _own_stream(scratch.device, torch.device(self._settings.staging_device)):
                while (header := lane.receive_header(self._settings.liveness_s)) is not None:
                    self._receive(lane, source, header, scratch)
        finally:
            lane.close()

    def _adopt(self, source: int, lane: ReceiveLane) -> bool:
        with self._lock:
            self._lanes[source] = lane
            self.counters[source] = lane.counters
            return not self._aborted

    def _receive(self, lane: ReceiveLane, source: int, header: PieceHeader, scratch: torch.Tensor) -> None:
        try:
            admitted = self._sink.admit(header, source)
        except PieceRefused as refusal:
            self._refuse(lane, header, scratch, refusal)
            raise
        try:
            lane.receive_payload(header, scratch, self._settings.transfer_s)
        except LaneError as error:
            if admitted:
                self._sink.lost(header)
            with suppress(LaneError):  # a lane that broke cannot answer
                lane.acknowledge(header, str(error))
            raise
        if admitted:
            self._sink.write(header, scratch)
        lane.acknowledge(header)
        if admitted:
            self._sink.settle(header)

    def _refuse(self, lane: ReceiveLane, header: PieceHeader, scratch: torch.Tensor, refusal: PieceRefused) -> None:
        """Answers with the reason. The payload is taken off the lane first, when it can be one of this lane's."""
        with suppress(LaneError):
            if 0 < header.num_bytes <= len(scratch):
                lane.receive_payload(header, scratch, self._settings.transfer_s)
        with suppress(LaneError):
            lane.acknowledge(header, str(refusal))
