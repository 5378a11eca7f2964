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
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from megastream.protocol.lane import LaneAddress, LaneError, LaneTimeout
from megastream.transport import wire
from megastream.transport.gloo_lane import GlooReceiveLane, GlooSendLane
from megastream.transport.gloo_pair import RECEIVER, SENDER, GlooPair, PairBroken, PairTimeout
from megastream.transport.meeting import Meeting, await_welcome, welcome


@dataclass(slots=True)
class _Offer:
    """An address that was given out, and the socket on which its one sender is awaited."""

    address: LaneAddress
    listening: socket.socket
    is_awaited: bool = False
    """A thread waits on the socket, and closes it: closed by another one, its number could be the next socket's before
    that thread wakes, and it would wait on that."""

    def void(self) -> None:
        """Ends an `accept` that waits; whoever is connected already, or comes, is refused by the kernel."""
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        if not self.is_awaited:
            self.listening.close()


class GlooReceiver:
    """Accepts the lanes of one engine rank; each is awaited on a port of its own that the system chose.

    `host` is a local address; lanes listen on it and nowhere else.
    """

    transport = "gloo"

    def __init__(self, host: str) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._offers: dict[int, _Offer] = {}
        self._is_open = True
        self._listen().close()  # whether that is possible is said here, and not when the first trainer attaches

    def address(self, source: int) -> LaneAddress:
        """A fresh address, for one connection of trainer rank `source`. Replaces an earlier one."""
        listening = self._listen()
        port = listening.getsockname()[1]
        offer = _Offer(LaneAddress(self.transport, self._host, port, f"trainer{source}-{_new_token()}"), listening)
        with self._lock:
            if self._is_open:
                replaced = self._offers.get(source)
                self._offers[source] = offer
            else:
                replaced = offer
        if replaced is not None:
            replaced.void()
        self._require_open()
        return offer.address

    def accept(self, address: LaneAddress, deadline_s: float) -> GlooReceiveLane:
        """Blocks until a trainer rank has connected to `address`; several threads may accept at a time.

        LaneTimeout after `deadline_s`; the address is void then, and the next try needs a new one. LaneError at once
        when the address was withdrawn, replaced or used, also while this waits, and when another thread waits there.
        """
        self._require_open()
        source, offer = self._await(address)
        name = f"lane trainer {source} -> {self._host}:{address.port}"
        until = time.monotonic() + deadline_s
        try:
            met = wire.accept(offer.listening, _token(address), until)
        except PairTimeout as error:
            raise LaneTimeout(f"{name}: nobody connected within {deadline_s:.1f} s") from error
        except PairBroken as error:
            raise LaneError(f"{name}: withdrawn while it waited for a trainer rank") from error
        finally:
            self.withdraw(address)
            offer.listening.close()
        try:
            welcome(met, until)
            return self._lane(GlooPair(Meeting(met, until), RECEIVER, self._host, _left_s(until)), name, until)
        except PairTimeout as error:
            raise LaneTimeout(f"{name}: a trainer rank came and did not go on within {deadline_s:.1f} s") from error
        except PairBroken as error:
            raise LaneError(f"{name}: connecting failed: {error}") from error
        finally:
            met.close()

    def withdraw(self, address: LaneAddress) -> None:
        """Makes `address` void, and ends an `accept` that waits for it. Any thread; others' addresses stay."""
        with self._lock:
            gone = [source for source, offer in self._offers.items() if offer.address == address]
            offers = [self._offers.pop(source) for source in gone]
        for offer in offers:
            offer.void()

    def close(self) -> None:
        """Makes all addresses void; lanes that are open stay. Idempotent."""
        with self._lock:
            self._is_open = False
            offers = list(self._offers.values())
            self._offers.clear()
        for offer in offers:
            offer.void()

    def _lane(self, pair: GlooPair, name: str, until: float) -> GlooReceiveLane:
        """The lane over a group that is up; until `until` (time.monotonic seconds) the other end waits for it, too."""
        return GlooReceiveLane(pair, name)

    def _await(self, address: LaneAddress) -> tuple[int, _Offer]:
        with self._lock:
            for source, offer in self._offers.items():
                if offer.address == address and not offer.is_awaited:
                    offer.is_awaited = True
                    return source, offer
        raise LaneError(f"lane {address.key} at {self._host}:{address.port}: withdrawn, replaced, or never offered")

    def _listen(self) -> socket.socket:
        try:
            return wire.listen(self._host)
        except PairBroken as error:
            raise LaneError(f"{error}; name a local address") from error

    def _require_open(self) -> None:
        if not self._is_open:
            raise LaneError(f"receiver at {self._host} is closed")


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
    with ExitStack() as stack:
        try:
            met = wire.dial(address.host, address.port, _token(address), until)
            stack.callback(met.close)
            await_welcome(met, until)
        except PairTimeout as error:
            raise LaneTimeout(f"{name}: not accepted within {deadline_s:.1f} s") from error
        except PairBroken as error:
            raise LaneError(
                f"{name}: no such lane there ({error}): another run's address, withdrawn, in use, or its engine is gone"
            ) from error
        try:
            return GlooPair(Meeting(met, until), SENDER, met.local_host, _left_s(until))
        except PairTimeout as error:
            raise LaneTimeout(f"{name}: the engine's end did not go on within {deadline_s:.1f} s") from error
        except PairBroken as error:
            raise LaneError(f"{name}: cannot connect: {error}") from error


def _new_token() -> str:
    return secrets.token_hex(wire.TOKEN_BYTES // 2)


def _token(address: LaneAddress) -> bytes:
    """What the sender says first: the end of the address's key, which two lanes never share."""
    return address.key[-wire.TOKEN_BYTES :].encode().ljust(wire.TOKEN_BYTES)[: wire.TOKEN_BYTES]


def _left_s(until: float) -> float:
    return max(until - time.monotonic(), 0.1)
