"""Lanes over torch.distributed and gloo: one two-rank group per lane, with a rendezvous of its own.

Never touches anybody's default group, and needs none. One piece is, in this order: header (broadcast, HEADER_BYTES),
payload, trailer (the piece's sequence number), and back an acknowledgement with an error text. Payloads are 1-D
contiguous uint8 CPU tensors and are neither copied nor kept: gloo reads the sender's memory until the acknowledgement,
and writes into the receiver's. Backpressure is gloo's own: a payload leaves only when the receiver has asked for it.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from typing import Any

from megastream.protocol.lane import LaneAddress, LaneError, LaneTimeout
from megastream.transport.gloo_lane import GlooReceiveLane, GlooSendLane
from megastream.transport.gloo_pair import (
    RECEIVER,
    SENDER,
    GlooPair,
    PairBroken,
    PairTimeout,
    await_key,
    client_store,
    prefixed,
    serve_store,
)

_TAKEN, _WITHDRAWN = b"taken", b"withdrawn"


class GlooReceiver:
    """Accepts the lanes of one engine rank. Holds one rendezvous store on a port that the system chose.

    `host` is a local address; store and lanes listen on it and nowhere else.
    """

    transport = "gloo"

    def __init__(self, host: str) -> None:
        self._host = host
        try:
            # Left to itself the store would listen on every interface; a socket of ours listens on `host` alone, and
            # between choosing the port and using it nobody can take it.
            with socket.create_server((host, 0), family=_family(host)) as listener:
                self._port: int = listener.getsockname()[1]
                self._store = serve_store(host, self._port, listener.detach())
        except OSError as error:
            raise LaneError(f"cannot listen on {host}: {error.strerror or error}; name a local address") from error
        self._lock = threading.Lock()
        self._offered: dict[int, LaneAddress] = {}

    def address(self, source: int) -> LaneAddress:
        """A fresh address, for one connection of trainer rank `source`. Replaces an earlier one."""
        store = self._open_store()
        address = LaneAddress(self.transport, self._host, self._port, f"trainer{source}-{secrets.token_hex(8)}")
        with self._lock:
            if (replaced := self._offered.get(source)) is not None:
                _void(store, replaced)
            store.set(_offer(address.key), b"1")
            self._offered[source] = address
        return address

    def accept(self, address: LaneAddress, deadline_s: float) -> GlooReceiveLane:
        """Blocks until a trainer rank has connected to `address`; several threads may accept at a time.

        LaneTimeout after `deadline_s`; the address is void then, and the next try needs a new one. LaneError at once
        when the address was withdrawn, replaced or used, also while this waits.
        """
        self._open_store()
        source = next((source for source, offered in self._offered.items() if offered == address), None)
        if source is None:
            raise LaneError(f"lane {address.key} at {self._host}:{self._port}: withdrawn, replaced, or never offered")
        name = f"lane trainer {source} -> {self._host}:{self._port}"
        until = time.monotonic() + deadline_s
        try:
            store = client_store(self._host, self._port, deadline_s)
            if await_key(store, _claim(address.key), deadline_s) != _TAKEN:
                raise LaneError(f"{name}: withdrawn while it waited for a trainer rank")
            left = max(until - time.monotonic(), 0.1)
            pair = GlooPair(prefixed(store, address.key), RECEIVER, self._host, left)
            lane = self._lane(pair, name, until)
        except PairTimeout as error:
            raise LaneTimeout(f"{name}: nobody connected within {deadline_s:.1f} s") from error
        except PairBroken as error:
            raise LaneError(f"{name}: connecting failed: {error}") from error
        finally:
            self.withdraw(address)
        return lane

    def withdraw(self, address: LaneAddress) -> None:
        """Makes `address` void, and ends an `accept` that waits for it. Any thread; others' addresses stay."""
        with self._lock:
            self._offered = {source: kept for source, kept in self._offered.items() if kept != address}
            if self._store is not None:
                _void(self._store, address)

    def close(self) -> None:
        """Ends the rendezvous; lanes that are open stay. Idempotent."""
        with self._lock:
            self._store = None

    def _lane(self, pair: GlooPair, name: str, until: float) -> GlooReceiveLane:
        """The lane over a group that is up; until `until` (time.monotonic seconds) the other end waits for it, too."""
        return GlooReceiveLane(pair, name)

    def _open_store(self) -> Any:
        if self._store is None:
            raise LaneError(f"receiver at {self._host}:{self._port} is closed")
        return self._store


def connect(address: LaneAddress, deadline_s: float) -> GlooSendLane:
    """The sender's end of the lane that `address` names; blocks until the receiver accepts. Once per address."""
    if address.transport != "gloo":
        raise LaneError(f"{name_of(address)}: the address is for transport {address.transport}, this is gloo")
    return GlooSendLane(meet(address, deadline_s), name_of(address))


def name_of(address: LaneAddress) -> str:
    """What a lane is called before its first piece."""
    return f"lane {address.key} at {address.host}:{address.port}"


def meet(address: LaneAddress, deadline_s: float) -> GlooPair:
    """The sender's end of the group behind an address; blocks until the receiver accepts. LaneError, LaneTimeout."""
    name, until = name_of(address), time.monotonic() + deadline_s
    try:
        with socket.create_connection((address.host, address.port), deadline_s) as probe:
            local = probe.getsockname()[0]
        store = client_store(address.host, address.port, deadline_s)
        # The first to remove the offer is the one it was for.
        if not store.delete_key(_offer(address.key)):
            raise LaneError(f"{name}: no such lane there: another run's address, withdrawn, or in use already")
        store.set(_claim(address.key), _TAKEN)
        return GlooPair(prefixed(store, address.key), SENDER, local, max(until - time.monotonic(), 0.1))
    except PairTimeout as error:
        raise LaneTimeout(f"{name}: not accepted within {deadline_s:.1f} s") from error
    except (OSError, PairBroken) as error:
        raise LaneError(f"{name}: cannot connect: {error}") from error


def _offer(key: str) -> str:
    return f"offer/{key}"


def _void(store: Any, address: LaneAddress) -> None:
    if store.delete_key(_offer(address.key)):
        store.set(_claim(address.key), _WITHDRAWN)


def _claim(key: str) -> str:
    """Set once per address, by whoever removed its offer: the sender that comes, or the receiver that withdraws it."""
    return f"claim/{key}"


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
