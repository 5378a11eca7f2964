"""Lanes over NCCL: every pair of a trainer rank and an engine rank has a communicator of its own.

Headers, trailers and acknowledgements go through the group that gloo lanes use. A piece is: header; the receiver's
"go", once it has room; the transfer, which only now occupies either GPU; a trailer; the acknowledgement. NCCL does not
notice a peer that dies. So while a transfer is under way both ends look at a second group, in which nothing is ever
sent, and abort their communicator when it fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megastream.protocol.header import PieceHeader, encode_header
from megastream.transport.checksum import WeightedSum
from megastream.transport.gloo_lane import (
    ACK_BYTES,
    CLOSE_GRACE_S,
    TRAILER_BYTES,
    GlooReceiveLane,
    GlooSendLane,
    as_bytes,
)
from megastream.transport.gloo_pair import (
    ACK_TAG,
    SENDER,
    TRAILER_TAG,
    GlooPair,
    PairBroken,
    PairTimeout,
    Work,
    wait,
)
from megastream.transport.nccl_library import NcclComm, NcclError, NcclTimeout

_GO = 255


class _Watched:
    """A communicator, and a second group in which nothing is ever sent: a receive there fails when the peer dies."""

    def __init__(self, comm: NcclComm, watch: GlooPair) -> None:
        self._comm, self._watch = comm, watch
        self._never: Work | None = watch.post_broadcast(torch.empty(1, dtype=torch.uint8), watch.peer)

    def is_gone(self) -> bool:
        return self._never is None or self._never.is_completed()

    def close(self) -> None:
        self._comm.close()
        self._never = None
        self._watch.close()


class NcclSendLane(GlooSendLane):
    """The trainer's end. `watch` is a second group of the same two processes."""

    def __init__(self, pair: GlooPair, name: str, device: torch.device, comm: NcclComm, watch: GlooPair) -> None:
        super().__init__(pair, name)
        self.device, self._hash = str(device), WeightedSum(device)
        self._comm, self._peer = comm, _Watched(comm, watch)

    def close(self) -> None:
        super().close()
        self._peer.close()

    def _ship(self, pair: GlooPair, header: PieceHeader, payload: torch.Tensor, until: float) -> bytes:
        pair.limit(max(until - time.monotonic(), 0.0) + CLOSE_GRACE_S)
        answer = torch.empty(ACK_BYTES, dtype=torch.uint8)
        answered = pair.post_receive(answer, ACK_TAG)
        announced = pair.post_broadcast(as_bytes(encode_header(header)), SENDER)
        wait(answered, until)
        if answer[0] != _GO:
            return answer.numpy().tobytes()
        wait(announced, until)
        acknowledged = pair.post_receive(answer, ACK_TAG)
        with _aborting(self._comm):
            done = self._comm.send(payload, self._check, until)
            trailer = pair.post_send(as_bytes(header.seq.to_bytes(TRAILER_BYTES, "little")), TRAILER_TAG)
            wait(acknowledged, until)
            wait(trailer, until)
            self._comm.finish(done, self._check, until)
        return answer.numpy().tobytes()

    def _check(self) -> None:
        if self._peer.is_gone():
            raise PairBroken("its connection is closed")


class NcclReceiveLane(GlooReceiveLane):
    """The engine's end."""

    def __init__(self, pair: GlooPair, name: str, device: torch.device, comm: NcclComm, watch: GlooPair) -> None:
        super().__init__(pair, name)
        self.device, self._hash = str(device), WeightedSum(device)
        self._comm, self._peer = comm, _Watched(comm, watch)

    def close(self) -> None:
        super().close()
        self._peer.close()

    def _take(self, pair: GlooPair, into: torch.Tensor, until: float) -> int:
        trailer = torch.empty(TRAILER_BYTES, dtype=torch.uint8)
        ended = pair.post_receive(trailer, TRAILER_TAG)
        wait(pair.post_send(as_bytes(bytes([_GO]).ljust(ACK_BYTES, b"\0")), ACK_TAG), until)
        with _aborting(self._comm):
            self._comm.finish(self._comm.receive(into, self._check, until), self._check, until)
            wait(ended, until)
        return int.from_bytes(trailer.numpy().tobytes(), "little")

    def _check(self) -> None:
        if self._broken or self._peer.is_gone():  # aborted by another thread, or the peer died
            raise PairBroken(self._broken or "its connection is closed")


@contextmanager
def _aborting(comm: NcclComm) -> Iterator[None]:
    """A transfer that fails is ended on the GPU, too. NCCL's errors come out as those of the group."""
    try:
        yield
    except (PairTimeout, PairBroken):
        comm.close()
        raise
    except NcclError as error:
        comm.close()
        raise (PairTimeout if isinstance(error, NcclTimeout) else PairBroken)(str(error)) from error
