"""A real Megatron trainer of two stages and a fake engine that follows it, in three processes, over real lanes."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megastream.control.embedded import EmbeddedServer
from megastream.control.redis_log import RedisLog
from megastream.engine.agent import RankAgent
from megastream.engine.coordinator import Coordinator
from megastream.families import family_of, load_shape
from megastream.layout.mesh import parse_engine_mesh
from megastream.layout.shard import RankLayout
from megastream.layout.synthetic import engine_layouts
from megastream.protocol.commit import CommitTable
from megastream.protocol.records import Accepted, Committed, Emitted, Sealed
from megastream.protocol.staging import Key
from megastream.sync import TrainerSync
from megastream.trainer import model
from megastream.trainer.config import TrainerConfig
from megastream.trainer.stepper import Listener
from megastream.transport.gloo import GlooReceiver
from tests.helpers.fake_engine import FakeCore, FakeLive
from tests.helpers.spine import ENGINE_SETTINGS, trainer_settings
from tests.helpers.steps import forward_backward
from tests.helpers.synthetic import empty_buffers, region
from tests.helpers.tiny import hf_config
from tests.helpers.training import adapter_of

ENGINE_MESH, ENGINE_RANKS = "tp1 pp2", 2
RUN, DEADLINE_S = "provisional", 30.0


class TinyLive(FakeLive):
    """Starts from a Hugging Face checkpoint, and writes what is live to a file after each commit."""

    def __init__(self, layout: RankLayout, folder: Path) -> None:
        self.layout, self.buffers, self.break_commits = layout, empty_buffers(layout), 0
        self._folder, self._commits = folder, 0
        full = load_file(folder / "model.safetensors")
        for shard in layout.shards:
            slices = tuple(slice(lo, hi) for lo, hi in zip(shard.box.lo, shard.box.hi, strict=True))
            region(self.buffers[shard.buffer], shard).copy_(full[shard.tensor][slices])

    def describe_whole(self) -> RankLayout:
        return self.layout  # no paused updates here

    def commit(self, prepared: dict[str, torch.Tensor]) -> None:
        super().commit(prepared)
        self._commits += 1
        torch.save(self.buffers, self._folder / f"live-{self._commits}-{self.layout.rank}.pt")


def engine_side(config: TrainerConfig) -> tuple[RankLayout, ...]:
    shape = load_shape(hf_config(config))
    return engine_layouts(family_of(shape), shape, parse_engine_mesh(ENGINE_MESH))


def serve(config: TrainerConfig, folder: Path, broken: bool) -> dict[str, Any]:
    """The engine, until the trainer has left."""
    layouts = engine_side(config)
    with (
        tempfile.TemporaryDirectory(prefix="megastream-control-") as socket,  # a socket's path must be short
        EmbeddedServer(socket) as server,
        _engine(server.url, layouts, folder) as core,
    ):
        if broken:
            _commit_what_is_provisional()
        _leave(folder / "url", server.url)
        log = RedisLog(server.url, RUN, reconnect_s=60)
        _wait_until(lambda: all((folder / f"done-{rank}").exists() for rank in range(config.pp)), "the trainer's end")
        records = [record for _, record in log.read("0", 0.01)]
        log.close()
        return {
            "committed": [(request.version, request.attempt) for request in core.commits],
            "accepted": [(r.version, r.attempt, r.train_step) for r in records if isinstance(r, Accepted)],
            "live": [record.version for record in records if isinstance(record, Committed)],
            "emitted": [(r.version, r.attempt, r.rank, r.payload_bytes) for r in records if isinstance(r, Emitted)],
        }


@contextmanager
def _engine(url: str, layouts: tuple[RankLayout, ...], folder: Path) -> Iterator[FakeCore]:
    def log() -> RedisLog:
        return RedisLog(url, RUN, reconnect_s=60)

    agents, receivers = [], []
    for rank, layout in enumerate(layouts):
        receivers.append(GlooReceiver("127.0.0.1"))
        agents.append(
            RankAgent(
                log(),
                engine="e",
                rank=rank,
                world_size=len(layouts),
                live=TinyLive(layout, folder),
                receiver=receivers[-1],
                settings=ENGINE_SETTINGS,
            )
        )
    core = FakeCore(agents)
    coordinator = Coordinator(log(), engine="e", world_size=len(layouts), core=core, settings=ENGINE_SETTINGS)
    for part in (*agents, coordinator):
        part.start()
    try:
        yield core
    finally:
        coordinator.close()
        core.close()
        for agent, receiver in zip(agents, receivers, strict=True):
            agent.close()
            receiver.close()


def _commit_what_is_provisional() -> None:
    """The coordinator as it must not be: whatever every rank has sealed goes live, accepted or not."""

    def next_commit(table: CommitTable) -> Key | None:
        for number, version in sorted(table._versions.items()):
            attempts = [attempt for attempt, _ in version.sealed]
            if attempts and table.in_flight is None and attempts.count(max(attempts)) == table.world_size:
                return Key(table.terms.incarnation, number, max(attempts))
        return None

    CommitTable.next_commit = next_commit  # type: ignore[method-assign]


def train(config: TrainerConfig, rank: int, folder: Path, poisoned: tuple[bool, ...], broken: bool) -> list[Any]:
    """Speculative steps, each provisional version sealed on the whole engine before the norm is looked at."""
    chunks, _, adapter = adapter_of(config, "speculative")
    adapter.load_hf(folder)
    log = RedisLog(_await(folder / "url"), RUN, reconnect_s=60)
    settings = trainer_settings("a", finality="speculative")
    sync = TrainerSync(log, rank=rank, world_size=config.pp, trainer=adapter, settings=settings)
    sync.attach()

    def withdrawn() -> None:
        if not config.router_expert_bias:  # which leaves when the step counts: no provisional version is whole
            _wait_until(
                lambda: _has(log, Committed if broken else Sealed, sync.next_version), "the provisional version"
            )
        sync.listener.withdrawn()

    listener = Listener(sync.listener.final, sync.listener.opens, withdrawn)
    stepper = adapter.stepper("speculative", listener, max_abort_rate=1.0)
    poison = [0.0]
    if config.pp == rank + 1:
        next(chunks[0].parameters()).register_hook(lambda grad: grad + poison[0])
    results = []
    for index, bad in enumerate(poisoned):
        poison[0] = math.nan if bad else 0.0
        forward_backward(config, chunks, index)
        result = stepper.step()
        results.append(result)
        if result.ok:
            version = sync.next_version
            sync.accept()
            sync.finish()
            sync.wait_committed(version, DEADLINE_S)
            adapter.save_raw(folder / f"raw-{version}")
    stepper.close()
    sync.finished("done")
    sync.close()
    log.close()
    _leave(folder / f"done-{rank}", "")
    return results


def _has(log: RedisLog, kind: type, version: int) -> bool:
    """All engine ranks sealed a version, or it is committed."""
    needed = ENGINE_RANKS if kind is Sealed else 1
    found = [r for _, r in log.read("0", 0.01) if isinstance(r, kind) and getattr(r, "version", -1) == version]
    return len(found) >= needed


def _leave(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def _await(path: Path) -> str:
    _wait_until(path.exists, path.name)
    return path.read_text()


def _wait_until(check: Any, what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.02)


def body(
    rank: int, world_size: int, init_method: str, config: TrainerConfig, folder: str, poisoned: Any, broken: bool
) -> Any:
    if rank == world_size - 1:
        return serve(config, Path(folder), broken)
    model.start_process_group(
        config, rank=rank, world_size=world_size - 1, init_method=init_method, deadline_s=DEADLINE_S
    )
    return train(config, rank, Path(folder), poisoned, broken)
