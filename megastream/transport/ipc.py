"""Lanes between processes of one host whose GPUs reach each other's memory: the engine copies out of the trainer's.

A payload's place is a CUDA IPC handle, opened once for each allocation, and an offset. The engine pulls the bytes on a
stream of its own, into its own memory. The trainer's memory is free again at the acknowledgement.
"""

from __future__ import annotations

import time

import torch

from megastream.protocol.lane import LaneError
from megastream.transport.cuda_driver import HANDLE_BYTES, Driver, DriverError
from megastream.transport.wire import Check, tries

_OFFSET_BYTES = 8
PLACE_BYTES = HANDLE_BYTES + _OFFSET_BYTES
_DYING_S = 1.0
"""Within this time a process that lost its memory has lost its connection, too."""


class IpcOutlet:
    """The trainer's end. A payload must lie in memory that torch's allocator got by cudaMalloc."""

    place_bytes = PLACE_BYTES

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._driver = name, Driver(device.index)
        self._places: dict[int, bytes] = {}

    def place(self, payload: torch.Tensor) -> bytes:
        """Where the payload lies. Slots are used again and again, so each address is asked for once."""
        at = payload.data_ptr()
        if at not in self._places:
            try:
                handle, offset = self._driver.export(at)
            except DriverError as error:
                raise LaneError(
                    f"{self._name}: the payload's memory cannot be shared ({error}); switch expandable segments off "
                    f"in PYTORCH_CUDA_ALLOC_CONF, or use transport nccl or gloo"
                ) from error
            self._places[at] = handle + offset.to_bytes(_OFFSET_BYTES, "little")
        return self._places[at]

    def go(self, payload: torch.Tensor, check: Check, until: float) -> None:
        """Never asked: the engine does the copying."""

    def settle(self, check: Check, until: float) -> None:
        """Nothing of this side is under way."""

    def stop(self) -> None: ...

    def close(self) -> None:
        self._driver.close()


class IpcIntake:
    """The engine's end."""

    place_bytes = PLACE_BYTES
    says_go = False

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._driver = name, Driver(device.index)
        self._stream, self._came = torch.cuda.Stream(device), torch.cuda.Event()
        self._open: dict[bytes, int] = {}

    def take(self, place: bytes, into: torch.Tensor, check: Check, until: float) -> torch.cuda.Event:
        handle, offset = place[:HANDLE_BYTES], int.from_bytes(place[HANDLE_BYTES:], "little")
        try:
            if handle not in self._open:
                self._open[handle] = self._driver.open(handle)
            source = self._open[handle] + offset
            self._driver.copy(into.data_ptr(), source, into.numel(), self._stream.cuda_stream)
        except DriverError as error:
            for _ in tries(time.monotonic() + _DYING_S):
                check()
            raise LaneError(f"{self._name}: the trainer's memory cannot be read: {error}") from error
        self._came.record(self._stream)  # whoever waits for it now does not mind that it is used again
        return self._came

    def look(self) -> None:
        """A copy needs no peer."""

    def stop(self) -> None: ...

    def close(self) -> None:
        self._stream.synchronize()
        for pointer in self._open.values():
            self._driver.forget(pointer)
        self._open.clear()
        self._driver.close()
