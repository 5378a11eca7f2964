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
    TrainingFinished,
)
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
    assert log.append(ready(1)) == lost[0].decode()
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
    assert time.monotonic() - started < 2.0
    with pytest.raises(ValueError, match="run id"):
        RedisLog("redis://127.0.0.1:1", "a b", reconnect_s=1.0)


def test_outage_then_flush_then_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One server that is away, comes back empty, is emptied again, and stays away."""
    caplog.set_level(logging.WARNING)
    with EmbeddedServer(tmp_path / "c") as server:
        trainer = RedisLog(server.url, RUN, reconnect_s=10.0)
        engine = RedisLog(server.url, RUN, reconnect_s=10.0)
        assert [trainer.next_incarnation() for _ in range(3)] == [1, 2, 3]
        trainer.append(ready(7, incarnation=3))
        trainer.raise_version(7)
        last = engine.read("0", 1.0)[-1][0]

        server.stop()
        started = time.monotonic()
        assert engine.read(last, 0.3) == []  # an outage does not hold a reader longer than it asked for
        assert 0.2 < time.monotonic() - started < 1.5
        assert engine.away_s > 0.1
        writing = threading.Thread(target=trainer.append, args=(ready(8, incarnation=3),))
        writing.start()
        time.sleep(0.5)
        server.start()
        writing.join(5.0)
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
        assert 0.4 < time.monotonic() - started < 2.0
        fresh.close()
