"""User and password of the control plane stand in no URL that is written down."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from megastream.control.embedded import EmbeddedServer
from megastream.control.login import LOGIN, login_arguments, split_login
from megastream.protocol.control import ControlError
from megastream.rl.launch import _login


@pytest.mark.parametrize(
    ("url", "bare", "login"),
    [
        ("redis://h:6379/2", "redis://h:6379/2", ""),
        ("redis://:se%40cret@h:6379/2", "redis://h:6379/2", ":se@cret"),
        ("rediss://me:secret@h", "rediss://h", "me:secret"),
        ("unix://me:secret@/tmp/s.sock?db=1", "unix:///tmp/s.sock?db=1", "me:secret"),
        ("unix:///tmp/s.sock?password=secret&db=1", "unix:///tmp/s.sock?db=1", ":secret"),
        ("unix:///tmp/a@b/s%20s.sock", "unix:///tmp/a@b/s%20s.sock", ""),
        ("redis://:a@b@h", "redis://h", ":a@b"),
        ("redis://[::1]:7/0", "redis://[::1]:7/0", ""),
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


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hush#hush@host",
        "redis://:hush/hush@host/0",
        "redis://:hush?hush@host",
        "redis://:7/hush@host/0",
        "redis://:7?hush@host",
        "redis://host:7/0?password=hush@hush",
        "redis://:hush@hush/hush@host",
        "redis://:hush\nhush@host",
        "redis://host:hush",
        "redis://[::1hush",
        "redis://hush\u2100:hush@host",
        "redis://us%3Aer:hush@host",
        "unix://me:hush/hush@/tmp/s.sock",
        "user:hush@host:6379",
        "http://user:hush@host",
        " redis://:hush@host",
    ],
)
def test_a_url_that_can_hide_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ControlError, match="control plane's URL") as caught:
        split_login(url)
    assert "hush" not in str(caught.value) and "\n" not in str(caught.value)
    assert "hush" not in str(caught.value.__cause__)
    with pytest.raises(ControlError, match="^--redis-url: "), _login(url):
        pass


def test_the_embedded_servers_url_names_its_socket_whatever_the_folder(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "a b#c?d%41é")
    client = redis.Redis.from_url(split_login(server.url)[0])
    assert client.connection_pool.connection_kwargs["path"] == str(server.socket)
