"""A real engine whose trainers come one after the other, and what a test asks about it when one has failed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megastream.control.embedded import EmbeddedServer
from megastream.control.redis_log import RedisLog
from megastream.protocol.records import Attach
from megastream.sync import EngineSync
from tests.helpers import reveal
from tests.helpers.engine import ROOT, Answer, Engine
from tests.helpers.tiny_moe import write_checkpoint
from tests.helpers.told import Told, everything, told
from tests.helpers.traffic import differing

RUN, ENGINE = "faults", "faulty"
SHORT_TIMES = {"manifest_s": 1.0, "transfer_s": 10.0, "commit_s": 20.0, "retry_s": 1.0, "poll_s": 0.05}
STAGES = {"pipeline_parallel_size": 2}


class Faulty:
    """The engine, and how trainers attach to it one after the other."""

    def __init__(self, engine: Engine, server: EmbeddedServer) -> None:
        self.engine, self.server, self.next_base = engine, server, reveal.BASE
        self.log = RedisLog(server.url, RUN, reconnect_s=60)
        self.host = EngineSync(self.log, engine=ENGINE)

    def take_base(self) -> int:
        """For the next trainer; its weights at the start spell 0, and are written over what is live."""
        base, self.next_base = self.next_base, self.next_base + reveal.BASE
        return base

    @contextmanager
    def training(self) -> Iterator[Told]:
        with told(self.server.url, RUN, self.take_base()) as trainer:
            yield trainer

    def ask(self) -> Answer:
        return self.engine.run(self.engine.ask(f"a{time.monotonic_ns()}", [20] * 4, 8))

    def labels(self) -> set[str]:
        """What tokens are stamped with now."""
        return set(self.ask().labels())

    def ranks(self, method: str, *args: Any) -> list[Any]:
        return self.engine.run(self.engine.ranks(method, *args))

    @contextmanager
    def broken(self, method: str, *args: Any) -> Iterator[None]:
        """While something is broken in a worker."""
        self.ranks(method, *args)
        try:
            yield
        finally:
            self.ranks("feed_mend")

    def records(self, kind: type, base: int) -> list[Any]:
        """Of the attachment that began at `base`."""
        found = everything(self.log)
        names = {r.attachment for r in found if isinstance(r, Attach) and r.base_version == base}
        return [r for r in found if isinstance(r, kind) and r.attachment in names]

    def until(self, check: Callable[[], Any], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, "not reached in time"
            time.sleep(0.05)

    def holds(self, version: int) -> None:
        """All live bytes are this version's; asked between two trainers."""
        self.ranks("feed_install")
        try:
            assert self.engine.run(differing(self.engine, version)) == []
        finally:
            self.ranks("feed_remove")

    def goes_on(self, serves: int) -> None:
        """`serves` is whole; replies belong to their calls; another trainer attaches, and its version becomes live."""
        self.holds(serves)
        replies = self.ranks("megastream_call", "status", {})
        assert [(r["ok"], r["rank"], r["label"]) for r in replies] == [(True, rank, str(serves)) for rank in (0, 1)]
        with self.training() as trainer:
            version = trainer.update()
            assert self.labels() == {str(version)}
        self.holds(version)


@contextmanager
def faulty_engine(folder: Path, **settings: Any) -> Iterator[Faulty]:
    """A real engine of two stages, with short times, and a control plane of its own."""
    model = write_checkpoint(folder / "m", reveal.MOE, reveal.weights(0))
    with EmbeddedServer(folder / "c") as server:
        ours = {"control_url": server.url, "run_id": RUN, "engine": ENGINE, "settings": {**SHORT_TIMES, **settings}}
        engine = Engine(model, additional_config={"megastream": ours}, **STAGES)
        try:
            faults = Faulty(engine, server)
            yield faults
            faults.log.close()
        finally:
            engine.close()


def killed_trainer(faulty: Faulty, *how: str) -> int:
    """Its base version, once the process is gone; the version behind that one was live."""
    base = faulty.take_base()
    command = [sys.executable, "-m", "tests.helpers.killed_trainer", faulty.server.url, RUN, str(base), *how]
    with subprocess.Popen(command, cwd=ROOT) as sender:
        try:
            assert sender.wait(120) == -signal.SIGKILL
        finally:
            sender.kill()
    return base
