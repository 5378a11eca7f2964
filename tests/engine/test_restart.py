"""A real engine is killed in the middle of training and started again: training goes on, the new one joins it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megastream.control.redis_log import RedisLog
from megastream.protocol.records import Attach, Attached, Committed
from megastream.protocol.step_records import Opened
from megastream.sync import TrainerSync
from tests.helpers import reveal
from tests.helpers.engine import Engine, Server
from tests.helpers.reveal_trainer import SETTINGS, RevealTrainer, step, training
from tests.helpers.tiny_moe import write_checkpoint
from tests.helpers.traffic import count, differing

pytestmark = pytest.mark.timeout(600)

RUN = "restart"
PROMPT = [20] * 4


class Training:
    """Steps for ever, a little apart, on all ranks alike, until `stop`; the last version is then live everywhere."""

    def __init__(self) -> None:
        self._stop, self._ended, self._go_on, self.last = threading.Event(), threading.Event(), True, -1
        self._together = threading.Barrier(4, self._decide)

    def stop(self) -> None:
        self._stop.set()

    def _decide(self) -> None:
        self._go_on = not self._stop.is_set()

    def body(self, sync: TrainerSync, trainer: RevealTrainer) -> None:
        version = sync.attach().version
        while True:
            self._together.wait(60)
            if not self._go_on:
                break
            version += 1
            step(sync, trainer, version)
            time.sleep(0.1)
        self.last = version
        sync.catch_up()
        sync.wait_committed(version, 60)
        self._together.wait(60)
        self._ended.wait(120)
        sync.finished("done")

    def end(self) -> None:
        self._ended.set()


class Log:
    def __init__(self, url: str) -> None:
        self._log, self._after, self.records = RedisLog(url, RUN, reconnect_s=60), "0", []

    def until(self, what: str, check: Callable[[list[Any]], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not check(self.records):
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
            entries = self._log.read(self._after, 0.2)
            self.records += [record for _, record in entries]
            self._after = entries[-1][0] if entries else self._after

    def close(self) -> None:
        self._log.close()


def plugin(url: str, engine: str) -> dict[str, Any]:
    return {"megastream": {"control_url": url, "run_id": RUN, "engine": engine, "records": True}}


def committed(records: list[Any], attachment: str) -> list[int]:
    return [r.version for r in records if isinstance(r, Committed) and r.attachment == attachment]


@pytest.mark.full
def test_an_engine_that_is_killed_and_started_again_joins_the_training_that_went_on(
    control_url: str, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "model", reveal.MOE, reveal.weights(0))
    settings = replace(SETTINGS, late_joiners=True, lag_s=1.0, alone_s=500.0, ready_s=300.0, launch="restart")
    run, log = Training(), Log(control_url)
    with training(control_url, RUN, run.body, settings=settings) as errors:
        try:
            with Server(model, "--additional-config", json.dumps(plugin(control_url, "one"))) as server:
                log.until("the first engine to follow", lambda r: len(committed(r, "i1")) >= 3, 60)
                server.kill()
            before = max(committed(log.records, "i1"))
            log.until("training to go on alone", lambda r: _alone(r) >= 5, 60)
            engine = Engine(model, additional_config=plugin(control_url, "two"))
            try:
                log.until("the second engine to follow", lambda r: len(committed(r, "i1-2")) >= 3, 120)
                answers = [engine.run(engine.ask(f"r{n}", PROMPT, 200)) for n in range(3)]
                run.stop()
                log.until("the last version", lambda r: max(committed(r, "i1-2")) == run.last, 60)
                answers.append(engine.run(engine.ask("last", PROMPT, 20)))
                run.end()
                engine.run(engine.ranks("feed_install"))
                assert engine.run(differing(engine, run.last)) == []
            finally:
                engine.close()
        finally:
            run.stop()
            run.end()
    log.close()
    assert errors == []
    found = count(answers)
    assert found["tokens"] == 620 and (found["mixed"], found["mislabelled"]) == (0, 0)
    assert set(answers[-1].labels()) == {str(run.last)}
    attach = next(r for r in log.records if isinstance(r, Attach) and r.engine == "two")
    attached = next(r for r in log.records if isinstance(r, Attached) and r.attachment == attach.attachment)
    assert attach.late_joiner and attached.version > before
    assert attached.replaced == (attached.version % reveal.BASE != 0), "every sixth version has the start's digits"


def _alone(records: list[Any]) -> int:
    """Versions that nobody took."""
    return sum(isinstance(record, Opened) and not record.takes and not record.joins for record in records)
