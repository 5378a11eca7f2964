"""How the two ends of a lane meet: one TCP connection, over which their gloo group exchanges its addresses.

torch's own TCPStore would do the same with less, but both of its ends ask the name server who the other one is
(`getnameinfo` in c10d's socket.cpp, torch 2.13; /etc/hosts does not know ::ffff:127.0.0.1). A name server that does not
answer, as in many containers, takes 10 s of a lane's deadline at each end, and a slow one delays every connection. Here
nothing is looked up but the address's own host. A lane's listening socket is its own, so a slow peer holds up no other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from datetime import timedelta

import msgspec

from megastream.transport.gloo_pair import PairBroken, dist
from megastream.transport.wire import Wire

_WELCOME = b"welcome!"
_LENGTH = struct.Struct("<I")
_LONGEST_BYTES = 1 << 16
"""gloo says 170 bytes about itself."""


def welcome(wire: Wire, until: float) -> None:
    """The receiver's answer to a sender that knew the token."""
    wire.send(_WELCOME, until)


def await_welcome(wire: Wire, until: float) -> None:
    """PairBroken when the receiver turned this sender away, PairTimeout when nobody accepts at `until`."""
    if wire.receive(len(_WELCOME), until) != _WELCOME:
        raise PairBroken("what listens there is no lane")


class Meeting(dist.Store):
    """The store of a two-rank group: what one end sets is sent to the other. PairBroken, PairTimeout after `until`.

    gloo uses it only while the group is made, from the thread that makes it.
    """

    def __init__(self, wire: Wire, until: float) -> None:
        super().__init__()
        self._wire, self._until = wire, until
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._known[key] = bytes(value)
        raw = msgspec.msgpack.encode((key, self._known[key]))
        self._wire.send(_LENGTH.pack(len(raw)) + raw, self._until)

    def get(self, key: str) -> bytes:
        while key not in self._known:
            self._hear()
        return self._known[key]

    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def _hear(self) -> None:
        (length,) = _LENGTH.unpack(self._wire.receive(_LENGTH.size, self._until))
        if length > _LONGEST_BYTES:
            raise PairBroken(f"the other end says a message of {length} bytes follows, the longest is {_LONGEST_BYTES}")
        try:
            key, value = msgspec.msgpack.decode(self._wire.receive(length, self._until), type=tuple[str, bytes])
        except msgspec.DecodeError as error:
            raise PairBroken(f"the other end said what is no address: {error}") from error
        self._known[key] = value
