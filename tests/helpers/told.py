"""A trainer whose ranks say what became of each version, also when they cannot go on."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from megastream.control.redis_log import RedisLog
from megastream.protocol.journal import EnginePoisoned, SyncError
from megastream.protocol.records import Record
from megastream.sync import TrainerSync
from tests.helpers.reveal_trainer import MESH, SETTINGS, RevealTrainer, step, training

WAIT_S, IDLE_S = 90.0, 400.0
"""For a word, far above any deadline of an engine that a test starts for it; and for an order, while engines start."""

Word = int | str
"""The version that is live, or why it is not."""


class Told:
    """Steps all ranks when it is told to. `version` is the newest, at first that of the weights at the start."""

    def __init__(self, base_version: int) -> None:
        self.base_version = self.version = base_version
        self._orders: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in range(MESH.world_size)]
        self._said: queue.SimpleQueue[Word] = queue.SimpleQueue()

    def words(self) -> set[Word]:
        """What the ranks say next; queue.Empty when one of them hangs."""
        return {self._said.get(timeout=WAIT_S) for _ in self._orders}

    def begin_update(self) -> int:
        """Steps all ranks once; `words` says what became of it."""
        self.version += 1
        for orders in self._orders:
            orders.put(self.version)
        return self.version

    def update(self) -> int:
        """One more version, which becomes live."""
        version = self.begin_update()
        words = self.words()
        assert words == {version}, words
        return version

    def fails(self) -> set[Word]:
        """One more version, which does not become live: every rank says why."""
        self.begin_update()
        words = self.words()
        assert all(isinstance(word, str) for word in words), words
        return words

    def end(self) -> None:
        for orders in self._orders:
            orders.put(None)

    def train(self, sync: TrainerSync, trainer: RevealTrainer) -> None:
        """A rank's whole training: attaches, follows the orders, says goodbye."""
        try:
            self._said.put(sync.attach(base_version=self.base_version).version)
            while (version := self._orders[trainer.layout.rank].get(timeout=IDLE_S)) is not None:
                step(sync, trainer, version)
                self._said.put(self._became_live(sync, version))
            sync.finished("done")
        except SyncError as error:
            self._said.put(str(error))

    @staticmethod
    def _became_live(sync: TrainerSync, version: int) -> Word:
        try:
            sync.wait_committed(version, WAIT_S / 2)
        except EnginePoisoned as error:
            return str(error)
        return version


def everything(log: RedisLog) -> list[Record]:
    """What the log holds: one read gives no more than a batch."""
    found: list[Record] = []
    after = "0"
    while entries := log.read(after, 0.01):
        found += [record for _, record in entries]
        after = entries[-1][0]
    return found


@contextmanager
def told(url: str, run_id: str, base_version: int, **settings: Any) -> Iterator[Told]:
    """Such a trainer, attached while the block runs. The weights at its start must spell 0."""
    trainer = Told(base_version)
    changed = replace(SETTINGS, launch=f"told-{base_version}", **settings)
    with training(url, run_id, trainer.train, settings=changed) as errors:
        try:
            assert trainer.words() == {base_version}
            yield trainer
        finally:
            trainer.end()
    assert errors == []
