"""The two threads with which every process stands on the control plane: one reads the log, one writes to it.

Neither lets a slow or lost server block its owner: what follows from records happens in the reader's thread, what is
posted leaves in the writer's. Neither ends because of what a record contains.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from megastream.protocol.control import ControlError, ControlLog
from megastream.protocol.records import Record

logger = logging.getLogger(__name__)

DATA_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What code raises because of the data that it was given. Data of another process must not end a thread of this one."""


def describe(error: BaseException) -> str:
    """One line for an error that nobody foresaw: its type says more than its text."""
    return f"{type(error).__name__}: {error}"


class Follower:
    """Hands every record of the log, from its beginning, to `take`, in order, in one thread.

    `tick` is called between reads, at least every `poll_s` seconds. A record that `take` cannot use goes to `refused`
    with the reason (None for what `tick` raised), and the next one is taken.

    Once the control plane is lost, `lost` is called with the reason. Without `retry_s` the thread then ends. With it
    the log is tried again every `retry_s` seconds, for ever, and one line is logged at either end of such a time.
    """

    def __init__(
        self,
        log: ControlLog,
        name: str,
        *,
        take: Callable[[Record], None],
        refused: Callable[[Record | None, str], None],
        lost: Callable[[str], None],
        tick: Callable[[], None] = lambda: None,
        poll_s: float = 0.25,
        retry_s: float | None = None,
    ) -> None:
        self._log, self._name, self._poll_s, self._retry_s = log, name, poll_s, retry_s
        self._take, self._refused, self._tick = take, refused, tick
        self._lost = lost
        self._lost_since: float | None = None
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
            except DATA_ERRORS as error:  # ControlError is one of them
                reason = str(error) if isinstance(error, ControlError) else f"cannot read the log: {describe(error)}"
                if self._retry_s is None:
                    return reason
                self._pause(reason, self._retry_s)
                continue
            self._returned()
            for position, record in records:
                after = position
                self._guard(lambda record=record: self._take(record), record)  # type: ignore[misc]
            self._guard(self._tick, None)
        return ""

    def _guard(self, call: Callable[[], None], record: Record | None) -> None:
        try:
            call()
        except DATA_ERRORS as error:
            what = "its own state" if record is None else f"a record {_kind(record)}"
            logger.exception("megastream-%s cannot use %s", self._name, what)
            self._refused(record, f"cannot use {what}: {describe(error)}")

    def _pause(self, reason: str, retry_s: float) -> None:
        """Says once that the log is lost; deadlines are looked at on."""
        if self._stop.is_set():
            return
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            logger.error(
                "%s has lost the control plane and no trainer can attach; what is live keeps serving; tried again "
                "every %g s: %s", self._name, retry_s, reason,
            )  # fmt: skip
            self._lost(reason)
        until = time.monotonic() + retry_s
        while (left := until - time.monotonic()) > 0 and not self._stop.wait(min(left, self._poll_s)):
            self._guard(self._tick, None)

    def _returned(self) -> None:
        if self._lost_since is not None:
            lost_s, self._lost_since = time.monotonic() - self._lost_since, None
            logger.warning("%s has the control plane back after %.0f s; a trainer can attach", self._name, lost_s)


class Outbox:
    """Appends records in the order in which they were posted. `post` returns at once, from any thread.

    What the control plane does not take now is kept and tried again every `retry_s` seconds until `close`.
    """

    def __init__(self, log: ControlLog, name: str, *, retry_s: float) -> None:
        self._log, self._name, self._retry_s = log, name, retry_s
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._told = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"megastream-{name}-outbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, record: Record) -> None:
        self._queue.put(record)

    def close(self, deadline_s: float = 5.0) -> None:
        """Sends what was posted, waiting at most `deadline_s`, and ends the thread."""
        self._closing.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            while not self._append(record):
                if self._closing.wait(self._retry_s):
                    logger.error("%s ends; its %s was never posted", self._name, _kind(record))
                    break

    def _append(self, record: Record) -> bool:
        """False when it has to be tried again."""
        try:
            self._log.append(record)
        except ControlError as error:
            if not self._told:
                logger.warning("%s keeps its %s and what follows, to post later: %s", self._name, _kind(record), error)
            self._told = True
            return False
        except DATA_ERRORS:
            logger.exception("%s leaves out a %s that cannot be posted", self._name, _kind(record))
        self._told = False
        return True


def _kind(record: Record) -> str:
    return type(record).__name__
