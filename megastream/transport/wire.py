"""One TCP connection between the two ends of a lane, on which every wait has a deadline. Over one they meet; the
messages of a GPU lane have another.

The kernel keeps messages in order and tells at once when the other process is gone, also while something else is
waited for (`is_gone`). Raises PairTimeout and PairBroken, as the group does over which the two ends met.
"""

from __future__ import annotations

import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from megastream.transport.gloo_pair import PairBroken, PairTimeout

TOKEN_BYTES = 16
_GREETING_S = 10.0
"""How long somebody who connects may take to say the token; a busy machine stands still for seconds."""
_CHUNK_BYTES = 1 << 16
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
_SPIN_S, _POLL_S = 0.0002, 0.00005
_LONGEST_WAIT_S = 1e6
"""The system takes no more than 2^31 ms for one wait, 24 days; who waits longer asks again."""

Check = Callable[[], None]
"""Raises PairBroken when there is nothing left to wait for."""


class Wire:
    """One end of the connection. Belongs to one thread, except `shut`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._came = connection, bytearray()
        self.local_host: str = connection.getsockname()[0]
        """The address of this end, as the kernel chose it."""

    def send(self, raw: bytes, until: float) -> None:
        """Blocks until the kernel has it all, or until `until` (time.monotonic seconds)."""
        left = memoryview(raw)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, until)
            except OSError as error:
                raise PairBroken(error.strerror or str(error)) from error

    def receive(self, num_bytes: int, until: float) -> bytes:
        """Exactly so many bytes. What came before a timeout is kept for the next call."""
        while len(self._came) < num_bytes:
            try:
                came = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                self._wait(select.POLLIN, until)
                continue
            except OSError as error:
                raise PairBroken(error.strerror or str(error)) from error
            if not came:
                raise PairBroken("its connection is closed")
            self._came += came
        raw = bytes(self._came[:num_bytes])
        del self._came[:num_bytes]
        return raw

    def has_message(self) -> bool:
        """`receive` would find something: bytes, or that the other end is gone."""
        return bool(self._came) or self._poll(select.POLLIN)

    def is_gone(self) -> bool:
        """The other end has closed its connection, whatever still lies unread here; or this end has."""
        return self._socket.fileno() < 0 or self._poll(_GONE)

    def shut(self) -> None:
        """Ends every wait on it, at both ends. Any thread may call it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent. Takes off what lies unread: with that the kernel would reset the connection, and could lose the
        last answer on its way."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(_CHUNK_BYTES):
                pass
        self._socket.close()

    def _wait(self, event: int, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise PairTimeout("nothing at the deadline")
        self._poll(event, min(left, _LONGEST_WAIT_S) * 1000)

    def _poll(self, event: int, milliseconds: float = 0) -> bool:
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(milliseconds))


def listen(host: str) -> socket.socket:
    """A socket for one `accept`, on a port that the system chose, on `host` and nowhere else. PairBroken."""
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family)
    except OSError as error:
        raise PairBroken(f"cannot listen on {host}: {error.strerror or error}") from error


def accept(listening: socket.socket, token: bytes, until: float) -> Wire:
    """The connection of whoever knows the token; others are turned away. PairTimeout; PairBroken when `listening` was
    shut down meanwhile."""
    while (left := until - time.monotonic()) > 0:
        try:
            listening.settimeout(min(left, _LONGEST_WAIT_S))
            wire = Wire(listening.accept()[0])
        except (TimeoutError, ConnectionError):  # a connection that is gone again is none
            continue
        except OSError as error:
            raise PairBroken(error.strerror or str(error)) from error
        with suppress(PairTimeout, PairBroken):
            said = wire.receive(TOKEN_BYTES, min(until, time.monotonic() + _GREETING_S))
            if secrets.compare_digest(said, token):
                return wire
        wire.close()
    raise PairTimeout("nobody connected")


def dial(host: str, port: int, token: bytes, until: float) -> Wire:
    """The other end of an `accept`."""
    try:
        limit_s = min(max(until - time.monotonic(), 0.001), _LONGEST_WAIT_S)
        wire = Wire(socket.create_connection((host, port), limit_s))
    except TimeoutError as error:
        raise PairTimeout(str(error)) from error
    except OSError as error:
        raise PairBroken(error.strerror or str(error)) from error
    wire.send(token, until)
    return wire


def tries(until: float) -> Iterator[None]:
    """For polling what cannot be waited for: often at first, then less often; ends at `until` (monotonic seconds)."""
    began = time.monotonic()
    while (now := time.monotonic()) <= until:
        yield
        time.sleep(0.0 if now - began < _SPIN_S else _POLL_S)
