"""Lanes between processes of one host whose GPUs reach each other's memory: the engine copies out of the trainer's.

Headers, trailers and acknowledgements go through the group that gloo lanes use. In place of a payload goes where it
lies: a CUDA IPC handle, opened once for each allocation, and an offset. The engine pulls the bytes on a stream of its
own, into its own memory, and checks them there. The trainer's memory is free again when `send` returns.
"""

from __future__ import annotations

import torch

from megastream.protocol.lane import LaneError
from megastream.transport.checksum import WeightedSum
from megastream.transport.cuda_driver import HANDLE_BYTES, Driver, DriverError
from megastream.transport.gloo_lane import GlooReceiveLane, GlooSendLane
from megastream.transport.gloo_pair import GlooPair

_OFFSET_BYTES = 8
PLACE_BYTES = HANDLE_BYTES + _OFFSET_BYTES


class IpcSendLane(GlooSendLane):
    """The trainer's end. A payload must lie in memory that torch's allocator got by cudaMalloc."""

    def __init__(self, pair: GlooPair, name: str, device: torch.device) -> None:
        super().__init__(pair, name)
        self.device, self._hash = str(device), WeightedSum(device)
        self._driver = Driver(device.index)
        self._places: dict[int, torch.Tensor] = {}

    def close(self) -> None:
        super().close()
        self._driver.close()

    def _in_group(self, payload: torch.Tensor) -> torch.Tensor:
        """Where the payload lies. Slots are used again and again, so each address is asked for once."""
        at = payload.data_ptr()
        if at not in self._places:
            try:
                self._places[at] = _place(*self._driver.export(at))
            except DriverError as error:
                raise LaneError(
                    f"{self._name}: the payload's memory cannot be shared ({error}); switch expandable segments off "
                    f"in PYTORCH_CUDA_ALLOC_CONF, or use transport nccl or gloo"
                ) from error
        return self._places[at]


class IpcReceiveLane(GlooReceiveLane):
    """The engine's end."""

    def __init__(self, pair: GlooPair, name: str, device: torch.device) -> None:
        super().__init__(pair, name)
        self.device, self._hash = str(device), WeightedSum(device)
        self._driver = Driver(device.index)
        self._stream = torch.cuda.Stream(device)
        self._open: dict[bytes, int] = {}

    def close(self) -> None:
        super().close()
        for pointer in self._open.values():
            self._driver.forget(pointer)
        self._open.clear()
        self._driver.close()

    def _take(self, pair: GlooPair, into: torch.Tensor, until: float) -> int:
        place = torch.empty(PLACE_BYTES, dtype=torch.uint8)
        seq = super()._take(pair, place, until)
        raw = place.numpy().tobytes()
        handle, offset = raw[:HANDLE_BYTES], int.from_bytes(raw[HANDLE_BYTES:], "little")
        try:
            if handle not in self._open:
                self._open[handle] = self._driver.open(handle)
            source = self._open[handle] + offset
            self._driver.copy(into.data_ptr(), source, into.numel(), self._stream.cuda_stream)
        except DriverError as error:
            raise LaneError(f"{self._name}: the trainer's memory cannot be read: {error}") from error
        self._stream.synchronize()
        return seq


def _place(handle: bytes, offset: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(handle + offset.to_bytes(_OFFSET_BYTES, "little")), dtype=torch.uint8)
