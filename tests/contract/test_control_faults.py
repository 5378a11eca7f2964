"""The control log among foreign and hostile entries, and while its server is away."""

from __future__ import annotations

import base64
import logging
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from megastream.control.embedded import EmbeddedServer
from megastream.control.redis_log import RedisLog
from megastream.protocol.control import ControlError
from megastream.protocol.records import (
    Detached,
    EngineReady,
    TrainerReady,
    TrainingFinished,
)
from tests.contract import SOON_S
from tests.contract.logs import RUN, ready, versions


def test_trimmed_records_are_reported_and_the_newest_is_read(
    connect: Callable[..., RedisLog], raw: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    writer, reader = connect(), connect()
    writer.append(ready(0))
    last = reader.read("0", 1.0)[-1][0]
    for version in range(1, 101):
        writer.append(ready(version))
    raw.xtrim(f"megastream:{RUN}:log", maxlen=5, approximate=False)
    raw.xdel(f"megastream:{RUN}:log", raw.xrevrange(f"megastream:{RUN}:log", count=2)[1][0])
    assert versions(reader.read(last, 1.0)) == [96, 97, 98, 100]
    assert "records 2 to 96 of run run-1 were trimmed" in caplog.text


def test_records_of_another_run_are_refused(
    connect: Callable[..., RedisLog], raw: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    log, foreign = connect(), connect("run-0")
    stale = foreign.append(TrainingFinished(attachment="a1", incarnation=1, version=9, reason="done"))
    assert log.read("0", 0.1) == []  # another run has another stream
    fields = raw.xrange("megastream:run-0:log", stale, stale)[0][1]
    raw.xadd(f"megastream:{RUN}:log", fields)
    log.append(ready(1))
    assert versions(log.read("0", 1.0)) == [1]
    assert "of run run-0, refused by run run-1" in caplog.text


class Marker:
    """Unpickling it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_hostile_entries_are_refused_and_crash_nothing(
    connect: Callable[..., RedisLog], raw: redis.Redis, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "marker"
    bomb = pickle.dumps(Marker(marker))
    good = b'{"run_id":"run-1","record":'
    deep = b"[" * 100_000 + b"]" * 100_000
    hostile: list[dict[Any, Any]] = [
        {"message": bomb},
        {"message": base64.b64encode(bomb)},
        {"message": f"!!python/object/apply:os.system ['touch {marker}']"},
        {"message": b"PK\x03\x04" + b"\0" * 64},
        {"message": b'"\xff\xfe"'},
        {"message": b"[" * 5000},
        {"message": good + b'{"record":"no_such_record"}}'},
        {"message": good + b'{"record":"detached","attachment":1,"engine":"e"}}'},
        {"message": good + b'{"record":"detached","attachment":"a","engine":"e"},"more":1}'},
        {"something": "else"},
        {"number": "not a number", "message": "{}"},
        {"number": str(10**30), "message": "{}"},
        {"number": "9" * 5000, "message": "{}"},
        {"message": good + b'{"record":"detached","attachment":"a","engine":"e","more":%s}}' % deep},
    ]
    log = connect()
    log.append(Detached(attachment="a", engine="first"))
    for fields in hostile:
        raw.xadd(f"megastream:{RUN}:log", fields)
    got = log.read("0", 1.0)
    assert [record.engine for _, record in got] == ["first"]
    refused = [line for line in caplog.messages if "refused" in line]
    assert len(refused) == len(hostile)
    started = time.monotonic()
    assert log.read(got[-1][0], 0.5) == []  # what was refused is not handed round in circles
    assert time.monotonic() - started > 0.4
    assert len([line for line in caplog.messages if "refused" in line]) == len(hostile)
    log.append(Detached(attachment="a", engine="last"))
    assert [record.engine for _, record in log.read(got[-1][0], 1.0)] == ["last"]
    assert not marker.exists()


def test_a_number_that_nobody_can_count_on_from_is_not_kept(connect: Callable[..., RedisLog]) -> None:
    log = connect()
    log.append(ready(5, incarnation=2))
    log.append(ready(10**30, incarnation=10**30))
    log.read("0", 1.0)
    log._kept = 0.0
    log.read("0", 0.0)
    assert (log.next_incarnation(), log.highest_version()) == (3, 5)


def test_what_stands_is_put_back_on_a_server_that_lost_it(
    connect: Callable[..., RedisLog], raw: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    log, fresh = connect(), connect()
    standing: list[Any] = [
        EngineReady(engine="e", rank=1, world_size=2, library=""),
        TrainerReady(incarnation=4, rank=0, world_size=1, library=""),
        Detached(attachment="i2", engine="e"),
    ]
    for name, record in zip("abc", [standing[0], Detached(attachment="i1", engine="e"), *standing[1:]], strict=False):
        log.put_blob(name, name.encode())
        log.append(record)
    log.append(standing[2])
    log.append(ready(1))
    last = log.read("0", 1.0)[-1][0]
    raw.flushall()
    log._kept = 0.0
    log.read(last, 1.0)
    found = [record for _, record in fresh.read("0", 1.0)]
    assert sorted(found, key=repr) == sorted(standing, key=repr), "the newest of each, once"
    assert [fresh.get_blob(name) for name in "abc"] == [b"a", b"b", b"c"]
    assert fresh.next_incarnation() == 5
    assert "lost its data; put back 3 blobs and 3 standing records" in caplog.text
    log._kept = 0.0
    log.read(last, 0.0)
    assert len(fresh.read("0", 0.1)) == 3, "and only once for each loss"
    silent_s = fresh.silent_s("e", 1)
    assert silent_s is not None and 0 <= silent_s < 5 and fresh.silent_s("e", 0) is None


def test_readers_too_notice_a_server_that_takes_no_writes(connect: Callable[..., RedisLog], raw: redis.Redis) -> None:
    log = connect()
    log.read("0", 0.0)  # all that it writes once is written
    raw.config_set("maxmemory", "1")
    try:
        for call in (lambda: log.get_blob("b"), lambda: log.read("0", 0.1)):
            log._kept = 0.0
            with pytest.raises(ControlError, match="maxmemory"):
                call()
    finally:
        raw.config_set("maxmemory", "0")
    assert log.read("0", 0.0) == []


def test_an_append_whose_reply_was_lost_is_not_doubled(connect: Callable[..., RedisLog]) -> None:
    log, real, lost = connect(), None, []
    real = log._append

    def lose_the_first_reply(*arguments: Any) -> Any:
        reply = real(*arguments)
        if not lost:
            lost.append(reply)
            raise redis.ConnectionError("reply lost")
        return reply

    log._append = lose_the_first_reply
    assert log.append(ready(1)) == lost[0][0].decode()
    log.append(ready(2))
    assert versions(log.read("0", 1.0)) == [1, 2]


def test_no_server_at_start_is_one_line_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    for url, match in [
        (f"unix://{tmp_path}/none.sock", "none.sock: cannot connect"),
        ("redis://user:secret@127.0.0.1:1/0", "redis://127.0.0.1:1/0: cannot connect"),
        ("http://example", "not a usable URL"),
    ]:
        with pytest.raises(ControlError, match=match) as caught:
            RedisLog(url, RUN, reconnect_s=30.0)
        assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    assert time.monotonic() - started < SOON_S, "far below reconnect_s"
    with pytest.raises(ValueError, match="run id"):
        RedisLog("redis://127.0.0.1:1", "a b", reconnect_s=1.0)
    with pytest.raises(ValueError, match="reconnect_s must be at least 0 and finite, got nan"):
        RedisLog("redis://127.0.0.1:1", "a", reconnect_s=float("nan"))


def test_outage_then_flush_then_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One server that is away, comes back empty, is emptied again, and stays away."""
    caplog.set_level(logging.WARNING)
    with EmbeddedServer(tmp_path / "c") as server:
        trainer = RedisLog(server.url, RUN, reconnect_s=30.0)
        engine = RedisLog(server.url, RUN, reconnect_s=30.0)
        assert [trainer.next_incarnation() for _ in range(3)] == [1, 2, 3]
        trainer.append(ready(7, incarnation=3))
        trainer.raise_version(7)
        last = engine.read("0", 1.0)[-1][0]

        server.stop()
        started = time.monotonic()
        assert engine.read(last, 0.3) == []  # an outage does not hold a reader longer than it asked for
        assert 0.2 < time.monotonic() - started < SOON_S
        assert engine.away_s > 0.1
        writing = threading.Thread(target=trainer.append, args=(ready(8, incarnation=3),))
        writing.start()
        time.sleep(0.5)
        server.start()
        writing.join(30.0)
        assert versions(engine.read(last, 5.0)) == [8]
        assert engine.away_s == 0.0
        assert "is away" in caplog.text and "is back" in caplog.text and "lost its data" in caplog.text

        trainer.close()
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        engine._kept = 0.0
        engine.read(last, 0.0)  # any open log puts back what must never fall
        fresh = RedisLog(server.url, RUN, reconnect_s=0.5)
        assert (fresh.next_incarnation(), fresh.highest_version()) == (4, 8)
        engine.close()

        server.stop()
        started = time.monotonic()
        with pytest.raises(ControlError, match=rf"{server.socket}.*append.*away for .* the limit is 0\.5 s"):
            fresh.append(ready(9))
        assert 0.4 < time.monotonic() - started < SOON_S
        server.start()  # given up, but not for ever: a later call tries again
        fresh.append(ready(10))
        assert versions(fresh.read("0", 1.0)) == [10]
        fresh.close()
