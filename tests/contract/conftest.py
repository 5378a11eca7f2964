"""Every lane test runs with every transport, every control test on one real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from megastream.control import redis_log
from megastream.control.embedded import EmbeddedServer
from megastream.control.redis_log import RedisLog
from tests.contract.lanes import SEVERAL, WITH_MARKS, Link
from tests.contract.logs import RUN


@pytest.fixture(params=WITH_MARKS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    link = Link(request.param)
    yield link
    link.close()


@pytest.fixture(params=SEVERAL)
def wide(request: pytest.FixtureRequest) -> Iterator[Link]:
    link = Link(request.param)
    yield link
    link.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("control")) as server:
        yield server


@pytest.fixture
def raw(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def connect(server: EmbeddedServer, raw: redis.Redis) -> Iterator[Callable[..., RedisLog]]:
    opened: list[RedisLog] = []

    def connect(run_id: str = RUN, reconnect_s: float = 10.0, keep_records: int = redis_log.KEEP_RECORDS) -> RedisLog:
        opened.append(RedisLog(server.url, run_id, reconnect_s=reconnect_s, keep_records=keep_records))
        return opened[-1]

    yield connect
    for log in opened:
        log.close()
