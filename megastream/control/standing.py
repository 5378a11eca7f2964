"""What one connection has published and what holds for as long as it lives: its blobs and its standing records."""

from __future__ import annotations

import threading

from megastream.protocol.records import STANDING, EngineReady, Record


class Standing:
    """Remembered so that a server which lost its data gets it again. Threads may share it.

    Of records of one kind about the same engine and rank the newest holds; of blobs the newest under each name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[tuple[str, str, int], tuple[Record, int]] = {}
        self._blobs: dict[str, bytes] = {}
        self.name = ""
        """Under which this connection is seen on the server: `<engine>/<rank>` once it has said EngineReady."""

    def note_record(self, record: Record, number: int) -> None:
        """`number`: which record of the log it is."""
        if isinstance(record, STANDING):
            key = type(record).__name__, getattr(record, "engine", ""), getattr(record, "rank", -1)
            with self._lock:
                self._records[key] = record, number
        if isinstance(record, EngineReady):
            self.name = seen_name(record.engine, record.rank)

    def note_blob(self, name: str, data: bytes) -> None:
        with self._lock:
            self._blobs[name] = data

    @property
    def records(self) -> list[Record]:
        return self.records_before(None)

    def records_before(self, number: int | None) -> list[Record]:
        """Those that the log holds further back than `number`; all of them for None."""
        with self._lock:
            return [record for record, at in self._records.values() if number is None or at < number]

    @property
    def blobs(self) -> dict[str, bytes]:
        with self._lock:
            return dict(self._blobs)


def seen_name(engine: str, rank: int) -> str:
    return f"{engine}/{rank}"
