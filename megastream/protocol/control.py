"""The contract of the control plane: an append-only log of records, and blobs. `control/` implements it on redis."""

from __future__ import annotations

from typing import Protocol

from megastream.protocol.records import Record


class ControlError(RuntimeError):
    """The control plane cannot be used. Names the server, what was tried, and for how long."""


class ControlLog(Protocol):
    """One connection to the control plane of one run. Safe to use from several threads.

    Every call reconnects by itself until the configured deadline, then raises ControlError. A later call tries again.

    A server that lost its data gets back from every connection that is still read from: the highest incarnation and
    version, the blobs that it put, and its standing records (`records.STANDING`).
    """

    run_id: str
    url: str
    """Where the server is, without a password: for messages."""

    def append(self, record: Record) -> str:
        """Adds a record; returns its id. Ids grow, and every reader sees the same order."""

    def read(self, after: str, block_s: float) -> list[tuple[str, Record]]:
        """Records behind id `after` ("0" is the beginning), waiting at most `block_s` for the first one.

        A record of another run id is refused: it is logged and left out.
        """

    def put_blob(self, name: str, data: bytes) -> None:
        """Stores bytes under a name of this run, for what is too large for a record (layouts)."""

    def get_blob(self, name: str) -> bytes | None:
        """The bytes, or None."""

    def next_incarnation(self) -> int:
        """1 for the first trainer of this run, then 2, 3, ... Atomic."""

    def highest_version(self) -> int:
        """The highest version ever published in this run, -1 before the first."""

    def raise_version(self, version: int) -> None:
        """Records that `version` is published. Atomic, never lowers the value."""

    def silent_s(self, engine: str, rank: int) -> float | None:
        """Seconds since this rank of an engine was last on the control plane; None when it never was."""

    def close(self) -> None: ...
