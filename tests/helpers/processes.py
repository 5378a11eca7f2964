"""Both sides as real processes over a real redis: engine ranks that answer a pipe, trainer ranks that can be killed."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from megastream.control.embedded import EmbeddedServer
from megastream.control.redis_log import RedisLog
from megastream.engine.agent import RankAgent
from megastream.engine.contract import CommitRequest
from megastream.engine.coordinator import Coordinator
from megastream.engine.settings import EngineSettings
from megastream.protocol.records import RankCommit
from megastream.sync import TrainerSettings, TrainerSync
from megastream.transport.gloo import GlooReceiver
from tests.helpers.fake_engine import FakeCore, FakeLive
from tests.helpers.fake_trainer import FakeTrainer
from tests.helpers.forked import forked
from tests.helpers.synthetic import differing, engine_side, trainer_side

RUN = "spine"
TRAINER, ENGINE = "tp1 pp2(2,1) ep2", "tp2 ep2"
SETTINGS = EngineSettings(bind_s=20, transfer_s=10, liveness_s=60, commit_s=20, detach_s=20, poll_s=0.05)
LIFE_S = 100.0
"""A process that lives longer dumps its stacks and dies."""

Body = Callable[[TrainerSync, FakeTrainer, Connection], Any]


class Process:
    """One child with a pipe. `ask` sends and waits for the answer; `kill` is SIGKILL."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = forked()
        self.pipe, there = context.Pipe()
        self._lock = threading.Lock()
        self.process = context.Process(target=_child, args=(target, there, *args), daemon=True)
        self.process.start()
        there.close()

    def ask(self, *message: Any, seconds: float = 30.0) -> Any:
        with self._lock:
            self.pipe.send(message)
            return self.answer(seconds)

    def answer(self, seconds: float = 30.0) -> Any:
        assert self.pipe.poll(seconds), f"process {self.process.pid} gave no answer for {seconds} s"
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(5)

    def end(self) -> None:
        self.process.kill()
        self.process.join(5)


class RemoteRank(Process):
    """An engine rank in its own process, as the fake core calls it."""

    def __init__(self, url: str, mesh: str, rank: int, settings: EngineSettings, name: str = "e") -> None:
        super().__init__(serve_engine_rank, url, mesh, rank, settings, name)

    def commit(self, request: CommitRequest) -> RankCommit:
        return self._reply(("commit", request), RankCommit(rank=-1, ok=False, stall_s=0, step=0, error="process gone"))

    def call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        return self._reply(("call", op, payload), {"done": True, "error": "process gone"})

    def _reply(self, message: tuple[Any, ...], gone: Any) -> Any:
        try:
            return self.ask(*message)
        except (EOFError, OSError):
            return gone


def serve_engine_rank(pipe: Connection, url: str, mesh: str, rank: int, settings: EngineSettings, name: str) -> None:
    layouts = engine_side(mesh)
    live, receiver = FakeLive(layouts[rank]), GlooReceiver("127.0.0.1")
    agent = RankAgent(
        RedisLog(url, RUN, reconnect_s=60),
        engine=name,
        rank=rank,
        world_size=len(layouts),
        live=live,
        receiver=receiver,
        settings=settings,
    )
    agent.start()
    while True:
        match pipe.recv():
            case ("commit", request):
                pipe.send(agent.commit(request))
            case ("call", op, payload):
                pipe.send(agent.call(op, payload))
            case ("differing", version):
                pipe.send(differing(live.layout, live.buffers, version))
            case ("held",):
                pipe.send((len(os.listdir("/proc/self/fd")), threading.active_count()))
            case ("close",):
                agent.close()
                receiver.close()
                pipe.send([thread.name for thread in threading.enumerate() if thread.name.startswith("megastream")])


def run_trainer_rank(
    pipe: Connection, url: str, mesh: str, rank: int, body: Body, content: int, settings: TrainerSettings
) -> None:
    layouts = trainer_side(mesh)
    trainer = FakeTrainer(layouts[rank], content)
    log = RedisLog(url, RUN, reconnect_s=60)
    sync = TrainerSync(log, rank=rank, world_size=len(layouts), trainer=trainer, settings=settings)
    try:
        pipe.send(("ok", body(sync, trainer, pipe)))
    except BaseException as error:  # noqa: BLE001  the parent asserts on it
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    sync.close()
    log.close()


@dataclass
class Side:
    url: str
    ranks: list[RemoteRank]
    core: FakeCore
    log: RedisLog

    def kill(self) -> None:
        """SIGKILL for every rank."""
        for rank in self.ranks:
            rank.kill()

    def records(self, kind: type) -> list[Any]:
        return [record for _, record in self.log.read("0", 0.01) if isinstance(record, kind)]

    def differing(self, version: int) -> list[str]:
        return [name for rank in self.ranks for name in rank.ask("differing", version)]


@contextmanager
def engine_processes(server: EmbeddedServer, settings: EngineSettings = SETTINGS) -> Iterator[Side]:
    with server, engine_at(server.url, "e", ENGINE, settings) as side:
        yield side


@contextmanager
def engine_at(url: str, name: str, mesh: str, settings: EngineSettings = SETTINGS) -> Iterator[Side]:
    """One engine of two ranks; `Side.kill` ends them as a crash does."""
    with ExitStack() as stack:
        ranks = [RemoteRank(url, mesh, rank, settings, name) for rank in range(2)]
        for rank in ranks:
            stack.callback(rank.end)
        core = FakeCore(ranks, at_once=settings.staging.is_given)
        stack.callback(core.close)
        log = RedisLog(url, RUN, reconnect_s=60)
        stack.callback(log.close)
        coordinator = Coordinator(log, engine=name, world_size=2, core=core, settings=settings)
        coordinator.start()
        stack.callback(coordinator.close)
        yield Side(url, ranks, core, log)


@contextmanager
def trainer_processes(side: Side, launch: str, body: Any, content: int = 0, **changes: Any) -> Iterator[list[Process]]:
    times = dict(ready_s=30.0, bind_s=30.0, transfer_s=30.0, attach_s=30.0, detach_s=30.0)
    settings = TrainerSettings(launch=launch, piece_bytes=4096, experts_per_unit=2, **times, **changes)
    ranks = [Process(run_trainer_rank, side.url, TRAINER, rank, body, content, settings) for rank in range(4)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def wait_until(check: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.05)


def _child(target: Callable[..., None], pipe: Connection, *args: Any) -> None:
    faulthandler.dump_traceback_later(LIFE_S, exit=True, file=sys.__stderr__)
    target(pipe, *args)
    os._exit(0)
