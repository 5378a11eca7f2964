"""The control log on a real server: order, remembered ids, foreign and hostile entries, outages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import redis

from megastream.control.redis_log import RedisLog
from megastream.protocol.control import ControlError
from megastream.protocol.records import (
    Bound,
    Committed,
    EngineReady,
    Failed,
    LaneAddress,
    RankCommit,
    TrainingFinished,
)
from tests.contract import SOON_S
from tests.contract.logs import RUN, ready, versions


def test_records_come_back_as_they_were_and_in_one_order(connect: Callable[..., RedisLog]) -> None:
    log, other = connect(), connect()
    written = [
        EngineReady(engine="e1", rank=0, world_size=2, library="vllm 0.32.0"),
        Bound(attachment="a", side="engine", rank=1, digest="d", addresses={3: LaneAddress("gloo", "::1", 5, "k")}),
        ready(1),
        Committed(attachment="a", incarnation=1, version=1, ranks=(RankCommit(0, True, 0.25, 7),), visible_unix_s=1.5),
        Failed(attachment="a", side="core", rank=0, reason="\N{SNOWMAN} gone"),
    ]
    ids = [(log if i % 2 else other).append(record) for i, record in enumerate(written)]
    got = log.read("0", 1.0)
    assert got == other.read("0", 1.0) == list(zip(ids, written, strict=True))
    assert log.read(ids[2], 1.0) == got[3:]


def test_read_waits_for_the_first_record_and_no_longer(connect: Callable[..., RedisLog]) -> None:
    log, other = connect(), connect()
    started = time.monotonic()
    assert log.read("0", 0.7) == []
    assert 0.6 < time.monotonic() - started < SOON_S
    threading.Timer(0.3, other.append, (ready(1),)).start()
    started = time.monotonic()
    assert versions(log.read("0", 30.0)) == [1]
    assert time.monotonic() - started < SOON_S
    assert log.read("0", 0.0) != [] and log.read(log.read("0", 0.0)[-1][0], 0.0) == []


def test_only_remembered_ids(connect: Callable[..., RedisLog]) -> None:
    for wrong in ("$", "+", "", "now"):
        with pytest.raises(ValueError, match=r"never \$"):
            connect().read(wrong, 0.1)


def test_a_late_reader_and_a_restarted_reader_miss_and_repeat_nothing(connect: Callable[..., RedisLog]) -> None:
    writer = connect()
    for version in (1, 2, 3):
        writer.append(ready(version))
    reader = connect()
    seen = reader.read("0", 1.0)
    assert versions(seen) == [1, 2, 3]
    reader.close()
    writer.append(ready(4))
    restarted = connect()
    assert versions(restarted.read(seen[-1][0], 1.0)) == [4]
    # Not applied, then died: a reader that remembers what it applied gets the record again.
    assert versions(connect().read(seen[-1][0], 1.0)) == [4]
    writer.append(TrainingFinished(attachment="a1", incarnation=1, version=4, reason="all steps done"))
    assert isinstance(connect().read("0", 1.0)[-1][1], TrainingFinished)


def test_blobs(connect: Callable[..., RedisLog]) -> None:
    connect().put_blob("engine/e1/0/stream", b"\0\xff" * 1000)
    assert connect().get_blob("engine/e1/0/stream") == b"\0\xff" * 1000
    assert connect().get_blob("engine/e1/1/stream") is None
    assert connect("run-2").get_blob("engine/e1/0/stream") is None


def test_numbers_are_atomic_and_never_fall(connect: Callable[..., RedisLog]) -> None:
    logs = [connect() for _ in range(4)]
    assert logs[0].highest_version() == -1
    numbers: list[int] = []

    def work(log: RedisLog, offset: int) -> None:
        for i in range(20):
            numbers.append(log.next_incarnation())
            log.raise_version(offset + 4 * i)

    threads = [threading.Thread(target=work, args=(log, offset)) for offset, log in enumerate(logs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(numbers) == list(range(1, 81))
    logs[0].raise_version(5)
    assert connect().highest_version() == 79


def test_threads_share_one_log(connect: Callable[..., RedisLog]) -> None:
    log, seen = connect(), []

    def follow() -> None:
        after = "0"
        while len(seen) < 100:
            entries = log.read(after, 2.0)
            seen.extend(versions(entries))
            after = entries[-1][0] if entries else after

    follower = threading.Thread(target=follow)
    follower.start()
    writers = [
        threading.Thread(target=lambda k=k: [log.append(ready(25 * k + i)) for i in range(25)]) for k in range(4)
    ]
    for thread in writers:
        thread.start()
    for thread in [*writers, follower]:
        thread.join(20)
    assert sorted(seen) == list(range(100))
    assert seen == versions(log.read("0", 0.0))


def test_a_dead_run_leaves_nothing_for_ever(connect: Callable[..., RedisLog], raw: redis.Redis) -> None:
    log = connect()
    log.append(ready(1))
    log.put_blob("b", b"1")
    log.next_incarnation()
    keys = raw.keys("*")
    assert {key.decode() for key in keys} == {f"megastream:{RUN}:{part}" for part in ("log", "state", "blobs")}
    assert all(0 < raw.ttl(key) <= 24 * 3600 for key in keys)
    for key in keys:
        raw.expire(key, 100)
    log._kept = 0.0
    log.read("0", 0.0)  # a reader alone keeps the run
    assert all(raw.ttl(key) > 100 for key in keys)


def test_a_long_run_keeps_its_newest_records_and_what_still_holds(
    connect: Callable[..., RedisLog], raw: redis.Redis
) -> None:
    """The log stays bounded; who comes late finds the engine that has been up since the beginning."""
    engine = EngineReady(engine="e1", rank=0, world_size=1, library="vllm 0.32.0")
    early, writer = connect(keep_records=400), connect(keep_records=400)
    early.append(engine)
    for version in range(2000):
        writer.append(ready(version))
        if version % 100 == 99:
            early._kept = 0.0  # a second has passed
            early.read("0", 0.0)
    assert raw.xlen(f"megastream:{RUN}:log") <= 600
    late, after, found = connect(), "0", list[object]()
    while entries := late.read(after, 0.0):
        found += [record for _, record in entries]
        after = entries[-1][0]
    assert engine in found
    assert found[-1] == ready(1999)


def test_close_ends_a_read_in_another_thread(connect: Callable[..., RedisLog]) -> None:
    log, said = connect(), []

    def follow() -> None:
        try:
            log.read("0", 30.0)
        except ControlError as error:
            said.append(str(error))

    thread = threading.Thread(target=follow)
    thread.start()
    time.sleep(0.1)
    log.close()
    thread.join(2.0)
    assert not thread.is_alive() and "closed" in said[0]
