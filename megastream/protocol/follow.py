"""The two threads with which every process stands on the control plane: one reads the log, one writes to it.

Neither lets a slow or lost server block its owner: what follows from records happens in the reader's thread, what is
posted leaves in the writer's.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from megastream.protocol.control import ControlError, ControlLog
from megastream.protocol.records import Record

logger = logging.getLogger(__name__)


class Follower:
    """Hands every record of the log, from its beginning, to `take`, in order, in one thread.

    `tick` is called between reads, at least every `poll_s` seconds. Once the control plane is lost for good, or a
    record could not be handled, `lost` is called with the reason and the thread ends.
    """

    def __init__(
        self,
        log: ControlLog,
        name: str,
        *,
        take: Callable[[Record], None],
        tick: Callable[[], None],
        lost: Callable[[str], None],
        poll_s: float = 0.25,
    ) -> None:
        self._log, self._take, self._tick, self._lost, self._poll_s = log, take, tick, lost, poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"megastream-{name}-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float = 5.0) -> None:
        """Ends the thread; waits for it unless called from it."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(deadline_s)

    def _run(self) -> None:
        reason = "the thread that follows the log broke off, its traceback is on stderr"
        try:
            reason = self._follow()
        finally:  # whatever ended it: whoever waits for records must not wait for ever
            if reason and not self._stop.is_set():
                self._lost(reason)

    def _follow(self) -> str:
        after = "0"
        while not self._stop.is_set():
            try:
                records = self._log.read(after, self._poll_s)
            except ControlError as error:
                return str(error)
            for position, record in records:
                after = position
                self._take(record)
            self._tick()
        return ""


class Outbox:
    """Appends records in the order in which they were posted. `post` returns at once, from any thread."""

    def __init__(self, log: ControlLog, name: str) -> None:
        self._log, self._name = log, name
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"megastream-{name}-outbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, record: Record) -> None:
        self._queue.put(record)

    def close(self, deadline_s: float = 5.0) -> None:
        """Sends what was posted, waiting at most `deadline_s`, and ends the thread."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._log.append(record)
            except ControlError as error:
                logger.error("%s could not post %s: %s", self._name, type(record).__name__, error)
                return
