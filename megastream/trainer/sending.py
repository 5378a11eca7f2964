"""Sends packed pieces over one lane, in the lane's own thread, as many under way as it takes."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

import torch

from megastream.protocol.lane import SendLane
from megastream.trainer.outgoing import Filled


class Sending:
    """`packed` holds pieces in order, which wait until they `may_leave`; None ends it.

    `release(filled, elements)` gives a slot back, with the elements that went out of it, which is none for a piece of a
    version that `is_withdrawn`.
    """

    def __init__(
        self,
        lane: SendLane,
        packed: queue.SimpleQueue[Filled | None],
        release: Callable[[Filled, int], None],
        *,
        is_withdrawn: Callable[[], bool],
        has_ended: Callable[[], bool],
        deadline_s: float,
        may_leave: threading.Event,
    ) -> None:
        self._lane, self._packed, self._release, self._deadline_s = lane, packed, release, deadline_s
        self._is_withdrawn, self._has_ended = is_withdrawn, has_ended
        self._may_leave = may_leave
        self._under_way: deque[Filled] = deque()

    def run(self) -> None:
        """Raises what the lane raises. At the end what is under way arrives, and nothing follows it."""
        while (filled := self._next()) is not None:
            if self._is_withdrawn():
                self._release(filled, 0)
            else:
                self._lane.post(filled.header(), filled.payload, self._deadline_s)
                self._under_way.append(filled)
        while self._under_way:
            self._await_oldest()

    def _next(self) -> Filled | None:
        """The next piece, once the lane has room for it. Acknowledgements are taken before nothing is there to post."""
        while self._under_way and (len(self._under_way) >= self._lane.window or self._packed.empty()):
            self._await_oldest()
        filled = self._packed.get()
        self._may_leave.wait()  # set by whoever ends the emitter, too
        return None if self._has_ended() else filled

    def _await_oldest(self) -> None:
        before = self._lane.counters.payload_bytes
        self._lane.acknowledged(self._deadline_s)
        filled = self._under_way.popleft()
        dtype: torch.dtype = getattr(torch, filled.piece.dtype)
        self._release(filled, (self._lane.counters.payload_bytes - before) // dtype.itemsize)
