"""A control log in memory, for tests in one process. Every connection is a MemoryLog over the same MemoryStore."""

from __future__ import annotations

import itertools
import threading

from megastream.protocol.control import ControlError
from megastream.protocol.records import Record


class MemoryStore:
    """What all connections of one run share. `away` makes every call fail, as if the server were gone for good."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.records: list[Record] = []
        self.blobs: dict[str, bytes] = {}
        self.incarnations = itertools.count(1)
        self.highest = -1
        self.away = False
        self.silent_s: float | None = 0.0


class MemoryLog:
    def __init__(self, store: MemoryStore, run_id: str = "run") -> None:
        self.run_id, self.url, self._store = run_id, "memory", store

    def append(self, record: Record) -> str:
        with self._store.changed:
            self._check()
            self._store.records.append(record)
            self._store.changed.notify_all()
            return str(len(self._store.records))

    def read(self, after: str, block_s: float) -> list[tuple[str, Record]]:
        with self._store.changed:
            begin = int(after)
            self._store.changed.wait_for(lambda: len(self._store.records) > begin or self._store.away, block_s)
            self._check()
            return [(str(i + 1), record) for i, record in enumerate(self._store.records) if i >= begin]

    def put_blob(self, name: str, data: bytes) -> None:
        self._check()
        self._store.blobs[name] = data

    def get_blob(self, name: str) -> bytes | None:
        self._check()
        return self._store.blobs.get(name)

    def next_incarnation(self) -> int:
        self._check()
        return next(self._store.incarnations)

    def highest_version(self) -> int:
        self._check()
        return self._store.highest

    def raise_version(self, version: int) -> None:
        self._check()
        self._store.highest = max(self._store.highest, version)

    def silent_s(self, engine: str, rank: int) -> float | None:
        self._check()
        return self._store.silent_s

    def close(self) -> None: ...

    def _check(self) -> None:
        if self._store.away:
            raise ControlError("the server in memory is away")
