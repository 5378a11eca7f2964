"""The embedded control server: private, gone with its parent, and clear when it cannot start."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis

from megastream.control import embedded
from megastream.control.embedded import EmbeddedServer
from megastream.protocol.control import ControlError


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def test_it_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    with EmbeddedServer(folder) as server:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("port") == {"port": "0"}
            assert client.config_get("save") == {"save": ""}
            client.set("key", "value")
        pid = server.pid
        assert alive(pid)
    assert wait_until_gone(pid)
    assert not folder.exists()
    with pytest.raises(ControlError, match="not running"):
        _ = server.pid
    server.stop()


PARENT = """
import sys, time
from megastream.control.embedded import EmbeddedServer
server = EmbeddedServer(sys.argv[1])
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_a_killed_parent_and_the_next_start_succeeds(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    with pytest.raises(ControlError, match="in use by a running server"):
        EmbeddedServer(tmp_path).start()
    parent.kill()
    parent.wait(5)
    parent.stdout.close()
    assert wait_until_gone(pid)
    with EmbeddedServer(tmp_path):
        pass


def test_ctrl_c_on_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        assert os.getpgid(server.pid) != os.getpgrp()


def test_a_stale_socket_is_removed_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = EmbeddedServer(tmp_path)
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(server.socket))
    with server:
        assert str(server.socket) in caplog.text
    server.socket.write_text("a file of somebody else")
    with pytest.raises(ControlError, match="is no socket"):
        server.start()


def test_a_killed_server_is_noticed_by_stop(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_start_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ControlError, match="107 fit; use a shorter folder"):
        EmbeddedServer(tmp_path / ("x" * 120)).start()
    said: list[str] = []

    def start() -> None:
        try:
            EmbeddedServer(tmp_path).start()
        except ControlError as error:
            said.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(5)
    assert "main thread" in said[0]
    broken = tmp_path / "broken-server"
    broken.write_text("#!/bin/sh\necho cannot open the frobnicator\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(embedded, "get_binary_path", lambda: broken)
    with pytest.raises(ControlError, match="ended with code 3: cannot open the frobnicator") as caught:
        EmbeddedServer(tmp_path / "control").start()
    assert "\n" not in str(caught.value)
