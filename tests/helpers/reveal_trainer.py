"""A trainer without Megatron whose weights spell their version: four ranks as threads, real lanes, real redis."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megastream.control.redis_log import RedisLog
from megastream.families import family_of, load_shape
from megastream.layout.mesh import parse_trainer_mesh
from megastream.layout.shard import RankLayout
from megastream.layout.synthetic import trainer_layouts
from megastream.sync import TrainerSettings, TrainerSync
from tests.helpers import reveal

SHAPE = load_shape(dict(reveal.MOE.config()))
MESH = parse_trainer_mesh("tp1 pp2 ep2")
SETTINGS = TrainerSettings(launch="test", piece_bytes=65536, experts_per_unit=2, ready_s=30.0, attach_s=60.0)


class RevealTrainer:
    """What TrainerSync asks of a trainer, for one rank."""

    library = "reveal"
    mesh = MESH
    shape = SHAPE
    family = family_of(SHAPE)
    weights = staticmethod(reveal.weights)

    def __init__(self, layout: RankLayout):
        self.layout = layout
        self.buffers = {s.name: torch.zeros(s.num_elements, dtype=getattr(torch, s.dtype)) for s in layout.buffers}
        self.fill(0)

    def describe(self) -> RankLayout:
        return self.layout

    def fill(self, version: int) -> None:
        """An optimizer step: the buffers hold another version."""
        weights = self.weights(version)
        for shard in self.layout.shards:
            box = tuple(slice(lo, hi) for lo, hi in zip(shard.box.lo, shard.box.hi, strict=True))
            flat = self.buffers[shard.buffer]
            flat.as_strided(shard.box.shape, shard.strides, shard.offset).copy_(weights[shard.tensor][box])


def step(sync: TrainerSync, trainer: RevealTrainer, version: int) -> None:
    """One training step whose weights go out bucket by bucket."""
    sync.begin(version, train_step=version)
    trainer.fill(version)
    for buffer in trainer.buffers:
        sync.final(buffer)
    sync.accept()
    sync.finish()


class Orders:
    """Lets a test say when the trainer ranks take their steps. The weights at first must be those of `base_version`."""

    step = staticmethod(step)

    def __init__(self, base_version: int | None = None) -> None:
        self.base_version = base_version
        self._orders: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in range(MESH.world_size)]
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def update(self, version: int) -> None:
        """Steps all ranks once and waits until `version` is live. queue.Empty when it takes too long."""
        for orders in self._orders:
            orders.put(version)
        for _ in self._orders:
            assert self._done.get(timeout=60) == version

    def end(self) -> None:
        for orders in self._orders:
            orders.put(None)

    def train(self, sync: TrainerSync, trainer: RevealTrainer) -> None:
        """A rank's whole training: attaches, follows the orders, says goodbye."""
        sync.attach(base_version=self.base_version)
        while (version := self._orders[trainer.layout.rank].get(timeout=120)) is not None:
            self.step(sync, trainer, version)
            sync.wait_committed(version, 30)
            self._done.put(version)
        sync.finished("done")


class SlowOrders(Orders):
    """Steps that count from their beginning, and whose second stage emits `behind_s` after the first one."""

    behind_s = 0.1

    def step(self, sync: TrainerSync, trainer: RevealTrainer, version: int) -> None:  # type: ignore[override]
        sync.begin(version, train_step=version)
        trainer.fill(version)
        sync.accept()
        time.sleep(trainer.layout.coords["pp"] * self.behind_s)
        for buffer in trainer.buffers:
            sync.final(buffer)
        sync.finish()


@contextmanager
def training(
    url: str,
    run_id: str,
    body: Callable[[TrainerSync, RevealTrainer], None],
    kind: type[RevealTrainer] = RevealTrainer,
    settings: TrainerSettings = SETTINGS,
) -> Iterator[list[str]]:
    """Runs `body` on every trainer rank while the block runs; yields what they raised, complete after the block."""
    layouts = trainer_layouts(kind.family, kind.shape, kind.mesh, bucket_elements=40000)
    errors: list[str] = []

    def run(layout: RankLayout) -> None:
        log = RedisLog(url, run_id, reconnect_s=60)
        world_size = len(layouts)
        trainer = kind(layout)
        sync = TrainerSync(log, rank=layout.rank, world_size=world_size, trainer=trainer, settings=settings)
        try:
            body(sync, trainer)
        except BaseException as error:  # noqa: BLE001  handed to the test
            errors.append(f"trainer rank {layout.rank}: {error}")
        finally:
            sync.close()
            log.close()

    threads = [threading.Thread(target=run, args=(layout,), daemon=True) for layout in layouts]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        for thread in threads:
            thread.join(60)
        errors += [f"{thread.name} hangs" for thread in threads if thread.is_alive()]
