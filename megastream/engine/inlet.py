"""The lanes of one attachment on one engine rank: one receiving thread each, all feeding one sink."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from megastream.engine.receiving import Receiving, Sink
from megastream.engine.settings import EngineSettings
from megastream.plan.types import Plan
from megastream.protocol.lane import LaneAddress, LaneCounters, ReceiveLane

logger = logging.getLogger(__name__)


class LaneReceiver(Protocol):
    """A transport's receiving end on one engine rank; makes one lane per trainer rank."""

    def address(self, source: int) -> LaneAddress:
        """A fresh address for the next lane from this trainer rank."""

    def accept(self, address: LaneAddress, deadline_s: float) -> ReceiveLane:
        """Waits until the trainer rank has connected to this address."""

    def withdraw(self, address: LaneAddress) -> None:
        """Makes this address void, and ends an `accept` that waits for it. Any thread."""


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
            Receiving(lane, source, self._most_bytes[source], self._sink, self._settings).run()
        finally:
            lane.close()

    def _adopt(self, source: int, lane: ReceiveLane) -> bool:
        with self._lock:
            self._lanes[source] = lane
            self.counters[source] = lane.counters
            return not self._aborted
