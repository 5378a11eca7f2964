"""Lanes over NCCL: every pair of a trainer rank and an engine rank has a communicator of its own.

Nothing is posted on either GPU before the receiver has said "go", because a transfer that waits for its peer occupies
thread blocks. NCCL does not notice a peer that dies; whoever waits here looks at the lane's connection, too, and a
transfer that fails is ended on the GPU by aborting the communicator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from megastream.transport.gloo_pair import PairBroken, PairTimeout
from megastream.transport.nccl_library import NcclComm, NcclError, NcclTimeout
from megastream.transport.wire import Check


class _NcclEnd:
    """A communicator whose errors come out as those of the lane's connection."""

    place_bytes = 0
    says_go = True

    def __init__(self, comm: NcclComm) -> None:
        self._comm = comm

    def stop(self) -> None:
        self._comm.close()

    def close(self) -> None:
        self._comm.close()

    def _run(self, call: Callable[..., torch.cuda.Event | None], *arguments: object) -> torch.cuda.Event | None:
        try:
            return call(*arguments)
        except NcclError as error:
            raise (PairTimeout if isinstance(error, NcclTimeout) else PairBroken)(str(error)) from error


class NcclOutlet(_NcclEnd):
    """The trainer's end."""

    def __init__(self, comm: NcclComm) -> None:
        super().__init__(comm)
        self._sent: deque[torch.cuda.Event | None] = deque()

    def place(self, payload: torch.Tensor) -> bytes:
        return b""

    def go(self, payload: torch.Tensor, check: Check, until: float) -> None:
        self._sent.append(self._run(self._comm.send, payload, check, until))

    def settle(self, check: Check, until: float) -> None:
        self._run(self._comm.finish, self._sent.popleft(), check, until)


class NcclIntake(_NcclEnd):
    """The engine's end."""

    def take(self, place: bytes, into: torch.Tensor, check: Check, until: float) -> torch.cuda.Event | None:
        return self._run(self._comm.receive, into, check, until)

    def look(self) -> None:
        self._run(self._comm.look)
