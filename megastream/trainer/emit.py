"""The emitter: final buckets go out as pieces while the trainer steps the next ones.

One thread per rank packs the pieces of a final bucket into bounded slots, one thread per lane sends them. The training
thread only says which bucket is final; before it changes weights again nothing may be leased (`is_packed_within`), and
`drain` waits until the engine has acknowledged everything.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from time import monotonic

import torch

from megastream.plan.types import Piece, Plan
from megastream.protocol.lane import SendLane
from megastream.trainer.outgoing import EmitError, EmitReport, Filled, MakeHeader, Still, by_buffer, slot_sizes, traffic
from megastream.trainer.pack import Packer
from megastream.trainer.sending import Sending
from megastream.trainer.slots import Slots

CLOSE_GRACE_S = 5.0
"""What closing allows beyond the deadline of what is under way, in seconds."""

logger = logging.getLogger(__name__)


class Emitter:
    """Emits this rank's pieces; made and used on every trainer rank.

    `begin`, `final` and `is_packed_within` belong to the training thread; `drain` may wait in another one meanwhile.

    `buffers` are live tensors by bucket name; `lanes` has one lane per engine rank that this rank sends to. With
    nothing to send for this rank every call is a no-op and the report is zero.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        buffers: Mapping[str, torch.Tensor],
        lanes: Mapping[int, SendLane],
        make_header: MakeHeader,
        *,
        slots_per_target: int,
        deadline_s: float,
        pieces: Iterable[Piece] | None = None,
    ) -> None:
        """`pieces`: those of this rank that it emits; without them all that the plan gives it."""
        self._rank, self._buffers, self._lanes = rank, buffers, dict(lanes)
        self._make_header, self._deadline_s = make_header, deadline_s
        mine = plan.by_source.get(rank, ()) if pieces is None else pieces
        self._pieces = by_buffer(mine, buffers, self._lanes, rank)
        self._slots = Slots(slots_per_target)
        self._slot_sizes = slot_sizes(self._pieces.values(), self._lanes, slots_per_target)
        self._condition = threading.Condition()
        self._version, self._attempt = -1, -1
        self._leases: set[str] = set()
        self._missing: set[str] = set()
        self._unacknowledged: Counter[int] = Counter()
        self._acknowledged_s = monotonic()
        self._wait_s = 0.0
        self._elements = 0
        self._before = traffic(self._lanes)
        self._withdrawn = False
        self._error: Exception | None = None
        self._closing = False
        self._final: queue.SimpleQueue[tuple[str, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._outgoing: dict[int, queue.SimpleQueue[Filled | None]] = {t: queue.SimpleQueue() for t in self._lanes}
        self._start_threads()

    # ---- the training thread's calls ---------------------------------------------------------------------------

    def begin(self, version: int, attempt: int) -> None:
        """Opens (version, attempt). EmitError when the previous one is under way but not drained, or a thread failed.

        One whose step was skipped, so that no bucket of it became final, is simply replaced.
        """
        with self._condition:
            self._raise_error()
            left = sum(self._unacknowledged.values())
            if left and self._missing != set(self._pieces):
                raise EmitError(
                    f"rank {self._rank}: version {self._version} still has {left} pieces out; drain or revoke first"
                )
            self._unacknowledged = Counter(piece.target for pieces in self._pieces.values() for piece in pieces)
            self._version, self._attempt, self._wait_s, self._elements = version, attempt, 0.0, 0
            self._withdrawn = False
            self._before = traffic(self._lanes)
            self._missing = set(self._pieces)

    def final(self, buffer_name: str) -> None:
        """The bucket's bytes are final and stay as they are until `is_packed_within` says so. Returns at once.

        A bucket without pieces is ignored. A failed thread is reported by the next call of another kind.
        """
        if buffer_name not in self._pieces:
            return
        with self._condition:
            if buffer_name not in self._missing:
                raise EmitError(f"rank {self._rank}: {buffer_name} is final twice, or before begin")
            self._missing.remove(buffer_name)
            self._leases.add(buffer_name)
        event = None
        if self._buffers[buffer_name].is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._final.put((buffer_name, event))

    def is_packed_within(self, seconds: float) -> bool:
        """Whether no bucket is leased: every final one lies packed in slots, so weights may change again."""
        return self._is_reached(lambda: not self._leases, seconds)

    def is_drained_within(self, seconds: float) -> bool:
        """Whether `drain` would return at once."""
        return self._is_reached(lambda: not any(self._unacknowledged.values()), seconds)

    def drain(self, deadline_s: float | None = None, every_s: float = inf, still: Still = None) -> EmitReport:
        """Blocks until the engine acknowledged every piece of the open version; the report says what went out.

        EmitError when it acknowledges none for `deadline_s`. While it does, `still` is called about every `every_s`.
        """
        self._wait(lambda: not any(self._unacknowledged.values()), deadline_s, "drain", every_s, still)
        counted = self._before, traffic(self._lanes)
        return EmitReport.counted(self._version, self._attempt, *counted, self._elements, self._wait_s, self._withdrawn)

    def revoke(self) -> None:
        """Takes the open version back without waiting for the engine: what is on a lane arrives, nothing follows it.

        The leases end at once, so weights may change again; `drain` returns when the lanes are free. Its report says
        what went out in vain.
        """
        with self._condition:
            self._withdrawn = True
            for name in self._missing:
                for piece in self._pieces[name]:
                    self._unacknowledged[piece.target] -= 1
            self._missing.clear()
            self._condition.notify_all()
        self._slots.wake()
        self._wait(lambda: not self._leases, None, "revoke")  # for the packing of one piece

    def close(self) -> None:
        """Ends all threads and closes the lanes, whatever happened before. Blocks for a deadline at most. Idempotent.

        What is under way arrives in that time; a thread that outlasts it is named in the log, and its lane broken off.
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._slots.wake()
        self._final.put(None)
        for outgoing in self._outgoing.values():
            outgoing.put(None)
        until = monotonic() + self._deadline_s + CLOSE_GRACE_S
        for thread in self._threads:
            thread.join(max(until - monotonic(), 0.0))
            if thread.is_alive():
                logger.error("rank %d: thread %s did not end; %s", self._rank, thread.name, self._state())
        self._close_lanes()

    def _close_lanes(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    # ---- threads -----------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        works: dict[str, Callable[[], None]] = {f"emit-pack-{self._rank}": self._pack_all}
        works |= {f"emit-send-{self._rank}-{target}": partial(self._send_all, target) for target in self._lanes}
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True) for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Whatever ends a thread early goes to the thread that trains; only what has no name here is on stderr too."""
        error: Exception | None = EmitError("its thread broke off, the traceback is on stderr")
        try:
            work()
            error = None
        except (RuntimeError, ValueError) as known:  # lanes, torch, headers
            error = known
        finally:
            if error is not None:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()
        self._slots.wake()

    def _pack_all(self) -> None:
        device = next((self._buffers[name].device for name in self._pieces), torch.device("cpu"))
        packer = Packer(device)
        for target, sizes in self._slot_sizes.items():
            self._slots.fill(target, [packer.new_slot(each, self._lanes[target].device) for each in sizes])
        while (entry := self._final.get()) is not None:
            name, event = entry
            for piece in self._pieces[name]:
                if (slot := self._take_slot(piece)) is not None:
                    self._pack(packer, piece, event, slot)
                elif self._closing or self._error:
                    return
                else:
                    self._done(piece.target)
            packer.finish()
            with self._condition:
                self._leases.discard(name)
                self._condition.notify_all()

    def _pack(self, packer: Packer, piece: Piece, event: torch.cuda.Event | None, slot: torch.Tensor) -> None:
        begin_sum = self._lanes[piece.target].checksum
        payload, checksum = packer.fill(piece, self._buffers[piece.source_buffer], event, slot, begin_sum)
        make_header = partial(self._make_header, piece, self._version, self._attempt)
        self._outgoing[piece.target].put(Filled(piece, slot, payload, checksum, make_header))

    def _take_slot(self, piece: Piece) -> torch.Tensor | None:
        """A free slot of the piece's target; None when the version was withdrawn, or the emitter ends."""
        started = monotonic()
        slot = self._slots.take(piece, lambda: self._withdrawn or self._has_ended(), self._deadline_s)
        self._wait_s += monotonic() - started
        if slot is None and not (self._withdrawn or self._has_ended()):
            with self._condition:
                raise EmitError(f"rank {self._rank}: no slot came free within {self._deadline_s} s; {self._state()}")
        return slot

    def _has_ended(self) -> bool:
        return self._closing or self._error is not None

    def _send_all(self, target: int) -> None:
        Sending(
            self._lanes[target],
            self._outgoing[target],
            self._release,
            is_withdrawn=lambda: self._withdrawn,
            has_ended=self._has_ended,
            deadline_s=self._deadline_s,
            may_leave=self._slots.may_leave,
        ).run()

    def _release(self, filled: Filled, elements: int) -> None:
        self._slots.give(filled.piece.target, filled.slot)
        self._done(filled.piece.target, elements)

    def _done(self, target: int, elements: int = 0) -> None:
        """A piece is acknowledged, or dropped with its version."""
        with self._condition:
            self._elements += elements
            self._acknowledged_s = monotonic()
            self._unacknowledged[target] -= 1
            if not any(self._unacknowledged.values()):  # nobody waits for less
                self._condition.notify_all()

    # ---- waiting -----------------------------------------------------------------------------------------------

    def _is_reached(self, done: Callable[[], bool], seconds: float) -> bool:
        """Blocks for so many seconds at most. EmitError when it cannot be reached any more."""
        with self._condition:
            reached = self._condition.wait_for(lambda: self._error or self._closing or done(), seconds)
            self._raise_error()
            return bool(reached)

    def _wait(
        self, done: Callable[[], bool], deadline_s: float | None, what: str, every_s: float = inf, still: Still = None
    ) -> None:
        limit = self._deadline_s if deadline_s is None else deadline_s
        since = monotonic()
        while not self._is_reached(done, min(every_s, since + limit - monotonic())):
            if self._acknowledged_s > since:
                since = self._acknowledged_s
                if still is not None:
                    still()
            elif monotonic() - since >= limit:
                with self._condition:
                    state = self._state()
                raise EmitError(f"rank {self._rank}: {what} of version {self._version} stood for {limit} s; {state}")

    def _state(self) -> str:
        """Who waits for whom, for an error message. The condition is held."""
        return self._slots.waits_for(self._leases, self._missing, self._unacknowledged)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise EmitError(f"rank {self._rank}: version {self._version} cannot go out: {self._error}") from self._error
        if self._closing:
            raise EmitError(f"rank {self._rank}: the emitter is closed")
