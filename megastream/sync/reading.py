"""Reading what the control plane has now, for whoever does not follow it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from megastream.protocol.control import ControlLog
from megastream.protocol.journal import SyncError
from megastream.protocol.records import Record

HERE_S = 2.0
"""One that was there so long ago may be asked to attach."""


def records_so_far(log: ControlLog, deadline_s: float) -> Iterator[Record]:
    """Every record that the log keeps now. SyncError when it does not end in time."""
    after, until = "0", time.monotonic() + deadline_s
    while records := log.read(after, 0.01):
        for position, record in records:
            after = position
            yield record
        if time.monotonic() > until:
            raise SyncError(f"records came faster than they were read for {deadline_s:g} s")


def is_here(log: ControlLog, engine: str, world_size: int, within_s: float = HERE_S) -> bool:
    """Every rank of an engine was on the control plane a moment ago: what the log says of it still holds."""
    silent = [log.silent_s(engine, rank) for rank in range(world_size)]
    return all(each is not None and each <= within_s for each in silent)
