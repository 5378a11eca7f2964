"""Several engine cores: two replicas take every version, one that dies is lost alone and its successor joins; cores of
one vLLM in data parallelism are two engines when they are independent, and are refused when they share a forward."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megastream.control.redis_log import RedisLog
from megastream.protocol.records import Attach, Attached, Committed, EngineReady, Failed
from megastream.rl import owned
from tests.engine.test_hot_cold import trainer_of, write
from tests.helpers import reveal
from tests.helpers.engine import Answer, Engine, segments_of
from tests.helpers.hard_traffic import hard_traffic
from tests.helpers.reveal_trainer import SETTINGS, Orders, training
from tests.helpers.tiny_moe import write_checkpoint
from tests.helpers.told import Told, everything, told
from tests.helpers.traffic import count, requests

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

RUN = "replicas"
UPDATES, TOKENS = 50, 20_000
LATE = {"engines": 2, "late_joiners": True, "lag_s": 5.0, "alone_s": 300.0, "ready_s": 60.0}


def plugin(url: str, engine: str, run: str = RUN) -> dict[str, Any]:
    return {"megastream": {"control_url": url, "run_id": run, "engine": engine}}


@dataclass
class Replicas:
    model: Path
    url: str
    engines: list[Engine]
    trainer: Told
    log: RedisLog

    def committed(self, engine: str) -> list[int]:
        """Versions that became live there, in order."""
        names = {attach.attachment for attach in self.records(Attach) if attach.engine == engine}
        return [record.version for record in self.records(Committed) if record.attachment in names]

    def records(self, kind: type) -> list[Any]:
        return [record for record in everything(self.log) if isinstance(record, kind)]


@pytest.fixture(scope="module")
def replicas(control_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """On a CPU a single worker is a process of its own too, and can be killed alone."""
    model = write_checkpoint(tmp_path_factory.mktemp("replicas"), reveal.MOE, reveal.weights(0))
    with ExitStack() as stack:
        engines = []
        for name in ("a", "b"):
            engine = Engine(model, additional_config=plugin(control_url, name))
            stack.callback(engine.close)
            engine.name = name
            engines.append(engine)
        log = RedisLog(control_url, RUN, reconnect_s=60)
        stack.callback(log.close)
        trainer = stack.enter_context(told(control_url, RUN, 0, **LATE))
        yield Replicas(model, control_url, engines, trainer, log)


def until(check: Callable[[], Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.05)


def clean(answers: list[Answer], tokens: int) -> None:
    """Every token is of one version, the one of its label, and no request ended otherwise than it was asked to."""
    found = count(answers)
    assert found["tokens"] >= tokens and (found["mixed"], found["mislabelled"]) == (0, 0), found
    assert {answer.finish_reason for answer in answers} <= {"length", "abort"}


def test_every_replica_takes_every_version(replicas: Replicas) -> None:
    first, second = replicas.engines
    with requests(first, hard_traffic) as on_first, requests(second, hard_traffic) as on_second:
        begun = {engine.name: engine.num_tokens for engine in replicas.engines}

        def made() -> int:
            """Tokens of the slower one."""
            return min(engine.num_tokens - begun[engine.name] for engine in replicas.engines)

        for number in range(UPDATES):
            until(lambda number=number: made() >= TOKENS * number // UPDATES, 60)  # type: ignore[misc]
            replicas.trainer.update()
        until(lambda: made() >= TOKENS, 60)
    for engine, answers in zip(replicas.engines, (on_first, on_second), strict=True):
        clean(answers, TOKENS)
        assert {label for answer in answers for label in answer.labels()} >= set(map(str, range(1, UPDATES + 1)))
        assert replicas.committed(engine.name) == list(range(1, UPDATES + 1))


def test_a_killed_worker_is_lost_alone_and_its_successor_joins(replicas: Replicas) -> None:
    """Its requests end with vLLM's own error, the trainer finds out at its next step, and the other replica notices
    nothing."""
    from vllm.v1.engine.exceptions import EngineDeadError

    first, second = replicas.engines
    trainer, (core,) = replicas.trainer, second.cores()
    segments = segments_of(core.pid)
    with requests(first) as on_first:
        trainer.update()
        begun = second.num_tokens
        dying = asyncio.run_coroutine_threadsafe(second.ask("dying", [20] * 4, 400), second.loop)
        until(lambda: second.num_tokens > begun + 5, 90)
        os.kill(*second.run(second.ranks("feed_pid")), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            dying.result(60)
        for _ in range(5):
            trainer.update()
        assert attachment(replicas, "b") in {record.attachment for record in replicas.records(Failed)}
        third = Engine(replicas.model, additional_config=plugin(replicas.url, "c"))
        try:

            def took_three() -> bool:
                trainer.update()
                return len(replicas.committed("c")) >= 3

            until(took_three, 120)
            with requests(third) as on_third:
                for _ in range(5):
                    trainer.update()
        finally:
            third.close()
            for name in segments:
                (owned.SHM / name).unlink(missing_ok=True)
        last = trainer.version
        trainer.update()
    clean(on_first, 1000)
    clean(on_third, 50)
    joined = [attach for attach in replicas.records(Attach) if attach.engine == "c"]
    attached = [record for record in replicas.records(Attached) if record.engine == "c"]
    assert [attach.late_joiner for attach in joined] == [True] and [record.replaced for record in attached] == [True]
    assert replicas.committed("c")[-1] == last
    assert replicas.committed("a") == list(range(1, trainer.version + 1))


def attachment(replicas: Replicas, engine: str) -> str:
    return next(attach.attachment for attach in replicas.records(Attach) if attach.engine == engine)


def test_independent_cores_of_one_vllm_are_engines_of_their_own(control_url: str, tmp_path: Path) -> None:
    """A dense model in data parallelism: every core has a name, and takes every version."""
    folders, run = write("llama", tmp_path), "dense-dp"
    engine = Engine(folders["a"], additional_config=plugin(control_url, "e", run), data_parallel_size=2)
    orders, log = Orders(), RedisLog(control_url, run, reconnect_s=60)
    try:
        settings = replace(SETTINGS, launch=run, engines=2)
        with training(control_url, run, orders.train, trainer_of(folders), settings) as errors:
            try:
                for version in (1, 2):
                    orders.update(version)
            finally:
                orders.end()
        assert errors == []
        records = everything(log)
    finally:
        log.close()
        engine.close()
    assert {record.engine for record in records if isinstance(record, EngineReady)} == {"e", "e-dp1"}
    engines = {record.attachment: record.engine for record in records if isinstance(record, Attach)}
    live = [(engines[record.attachment], record.version) for record in records if isinstance(record, Committed)]
    assert sorted(live) == [("e", 1), ("e", 2), ("e-dp1", 1), ("e-dp1", 2)]


def test_cores_that_share_a_forward_are_refused_when_a_trainer_attaches(control_url: str, tmp_path: Path) -> None:
    """Nothing orders a commit over the queues of two cores, and a step of this model goes through both."""
    model, run = write_checkpoint(tmp_path / "model", reveal.MOE, reveal.weights(0)), "moe-dp"
    engine = Engine(model, additional_config=plugin(control_url, "e", run), data_parallel_size=2)
    try:
        with training(control_url, run, lambda sync, trainer: sync.attach()) as errors:
            pass
    finally:
        engine.close()
    assert len(errors) == 4
    assert all("several engine cores share the model; use --data-parallel-size 1" in error for error in errors), errors
