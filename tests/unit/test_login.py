"""User and password of the control plane stand in no URL that is written down."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from megastream.control.login import LOGIN, login_arguments, split_login
from megastream.rl.launch import _login


@pytest.mark.parametrize(
    ("url", "bare", "login"),
    [
        ("redis://h:6379/2", "redis://h:6379/2", ""),
        ("redis://:se%40cret@h:6379/2", "redis://h:6379/2", ":se@cret"),
        ("rediss://me:secret@h", "rediss://h", "me:secret"),
        ("unix://me:secret@/tmp/s.sock?db=1", "unix:///tmp/s.sock?db=1", "me:secret"),
        ("unix:///tmp/s.sock?password=secret&db=1", "unix:///tmp/s.sock?db=1", ":secret"),
    ],
)
def test_split_and_back(monkeypatch: pytest.MonkeyPatch, url: str, bare: str, login: str) -> None:
    assert split_login(url) == (bare, login)
    monkeypatch.setenv(LOGIN, login)
    direct, indirect = redis.Redis.from_url(url), redis.Redis.from_url(bare, **login_arguments())
    mine, theirs = indirect.connection_pool.connection_kwargs, direct.connection_pool.connection_kwargs
    for name in ("username", "password", "db", "path", "host"):
        assert mine.get(name) == theirs.get(name)


def test_login_is_in_the_environment_only_while_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOGIN, raising=False)
    with _login("redis://me:secret@h") as url:
        assert url == "redis://h" and login_arguments() == {"username": "me", "password": "secret"}
    assert login_arguments() == {}


def test_a_url_without_login_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(LOGIN, "me:secret")
    with _login(f"unix://{tmp_path}/s.sock"):
        pass
    assert login_arguments() == {"username": "me", "password": "secret"}
