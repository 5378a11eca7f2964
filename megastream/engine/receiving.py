"""How one lane is received, in a thread of its own: the next pieces move while one is checked and written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from megastream.engine.settings import EngineSettings
from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneError, ReceiveLane
from megastream.protocol.staging import PieceRefused


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


@dataclass(frozen=True, slots=True)
class _Begun:
    """A piece whose bytes were asked for."""

    header: PieceHeader
    scratch: torch.Tensor
    admitted: bool


class Receiving:
    """Receives from one lane. Room for `lane.window` pieces of `most_bytes` is made as the sender fills it."""

    def __init__(self, lane: ReceiveLane, source: int, most_bytes: int, sink: Sink, settings: EngineSettings) -> None:
        self._lane, self._source, self._most_bytes = lane, source, most_bytes
        self._sink, self._settings = sink, settings
        self._free: list[torch.Tensor] = []
        self._begun: deque[_Begun] = deque()

    def run(self) -> None:
        """Returns when the sender has closed the lane. Raises LaneError, PieceRefused, and what the sink raises."""
        try:
            with self._own_stream():
                while (header := self._next_header()) is not None:
                    self._begin(header)
        finally:
            for begun in self._begun:
                if begun.admitted:
                    self._sink.lost(begun.header)

    def _next_header(self) -> PieceHeader | None:
        while self._begun and (len(self._begun) == self._lane.window or not self._lane.has_header()):
            self._finish_oldest()
        return self._lane.receive_header(self._settings.liveness_s)

    def _begin(self, header: PieceHeader) -> None:
        if self._begun and _version(header) != _version(self._begun[-1].header):
            self._finish_all()  # a new version may wait for room that only those before it can make
        try:
            admitted = self._sink.admit(header, self._source)
        except PieceRefused as refusal:
            self._finish_all()
            self._refuse(header, refusal)
            raise
        scratch = self._free.pop() if self._free else self._new_scratch()
        self._begun.append(_Begun(header, scratch, admitted))
        self._lane.begin_payload(header, scratch, self._settings.transfer_s)

    def _finish_all(self) -> None:
        while self._begun:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        begun = self._begun[0]
        try:
            self._lane.finish_payload(begun.header, self._settings.transfer_s)
        except LaneError as error:
            with suppress(LaneError):  # a lane that broke cannot answer
                self._lane.acknowledge(begun.header, str(error))
            raise
        self._begun.popleft()
        if begun.admitted:
            self._sink.write(begun.header, begun.scratch)
        self._free.append(begun.scratch)
        self._lane.acknowledge(begun.header)
        if begun.admitted:
            self._sink.settle(begun.header)

    def _refuse(self, header: PieceHeader, refusal: PieceRefused) -> None:
        """Answers with the reason. The payload is taken off the lane first, when it can be one of this lane's."""
        with suppress(LaneError):
            if 0 < header.num_bytes <= self._most_bytes:
                self._lane.begin_payload(header, self._new_scratch(), self._settings.transfer_s)
                self._lane.finish_payload(header, self._settings.transfer_s)
        with suppress(LaneError):
            self._lane.acknowledge(header, str(refusal))

    def _new_scratch(self) -> torch.Tensor:
        return torch.empty(self._most_bytes, dtype=torch.uint8, device=self._lane.device)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """This thread's work on a GPU goes beside the engine's steps."""
        devices = (torch.device(self._lane.device), torch.device(self._settings.staging_device))
        gpu = next((device for device in devices if device.type == "cuda"), None)
        with torch.cuda.stream(torch.cuda.Stream(gpu)) if gpu is not None else nullcontext():
            yield


def _version(header: PieceHeader) -> tuple[int, int]:
    return header.version, header.attempt
