"""Lanes of whichever transport: both ends meet over gloo, say what they have, and the engine's end decides."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from megastream.protocol.lane import LaneAddress, LaneError, LaneTimeout, ReceiveLane, SendLane
from megastream.transport import gloo, nccl_library, wire
from megastream.transport.choice import WANTED, Side, Wanted, choose
from megastream.transport.cuda_driver import Driver, DriverError
from megastream.transport.gloo_lane import GlooReceiveLane, GlooSendLane, as_bytes
from megastream.transport.gloo_pair import RECEIVER, SENDER, GlooPair, PairBroken, PairTimeout, wait
from megastream.transport.ipc import IpcIntake, IpcOutlet
from megastream.transport.nccl import NcclIntake, NcclOutlet
from megastream.transport.nccl_library import NcclComm, NcclError
from megastream.transport.wire import Wire
from megastream.transport.wire_lane import WireReceiveLane, WireSendLane

logger = logging.getLogger(__name__)

_HELLO_BYTES, _HELLO_TAG = 2048, 5
_PROBE_BYTES = 512
Said = TypeVar("Said")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's answer to a trainer's `Side`. `refused` says why there is no lane."""

    transport: str = ""
    why: str = ""
    nccl_id: bytes = b""
    port: int = 0
    """Of a GPU lane's connection, at the address's host; whoever connects says the token first."""
    token: bytes = b""
    refused: str = ""


class Receiver(gloo.GlooReceiver):
    """Accepts the lanes of one engine rank over `transport`; `device` is where its weights are.

    `say` is told of every lane which way it goes, and why. ValueError for a transport that this rank can never have.
    """

    def __init__(
        self, host: str, transport: Wanted, device: torch.device, say: Callable[[str], None] = logger.info
    ) -> None:
        if transport in ("nccl", "ipc") and device.type != "cuda":
            raise ValueError(f"transport {transport} needs an engine on a GPU, and this one is on {device}; use gloo")
        super().__init__(host)
        self.transport, self._device, self._tell = transport, with_index(device), say

    def _lane(self, pair: GlooPair, name: str, until: float) -> Any:
        if self.transport == "gloo":
            return GlooReceiveLane(pair, name)
        try:
            return self._agree(pair, name, until)
        except (PairTimeout, PairBroken, RuntimeError):  # lanes, drivers, torch
            pair.close()
            raise

    def _agree(self, pair: GlooPair, name: str, until: float) -> ReceiveLane:
        trainer = hear(pair, Side, until)
        engine = describe(self._device, tried=trainer)
        try:
            transport, why = choose(self.transport, trainer, engine)  # type: ignore[arg-type]
        except ValueError as error:
            say(pair, Verdict(refused=str(error)), until)
            raise LaneError(f"{name}: {error}") from error
        verdict = Verdict(transport=transport, why=why)
        self._tell(f"{name} goes over {transport} ({why})")
        if transport == "gloo":
            say(pair, verdict, until)
            return GlooReceiveLane(pair, name)
        if transport == "nccl":
            verdict = msgspec.structs.replace(verdict, nccl_id=nccl_library.unique_id())
        connection = open_wire(pair, self._host, verdict, until)
        if transport == "ipc":
            return WireReceiveLane(connection, name, self._device, IpcIntake(name, self._device))
        comm = _join(connection, verdict.nccl_id, RECEIVER, self._device, name, until)
        return WireReceiveLane(connection, name, self._device, NcclIntake(comm))


def connect(address: LaneAddress, deadline_s: float, device: torch.device) -> SendLane:
    """The sender's end of the lane that `address` names, for weights on `device`. Once per address; blocks.

    LaneError names what stands against the transport that the engine was told to use.
    """
    name, until = gloo.name_of(address), time.monotonic() + deadline_s
    if address.transport not in WANTED:
        raise LaneError(f"{name}: the address is for transport {address.transport}; known are {', '.join(WANTED)}")
    if address.transport == "gloo":
        return gloo.connect(address, deadline_s)
    pair = gloo.meet(address, deadline_s)
    try:
        return _agree(pair, address, with_index(device), until)
    except PairTimeout as error:
        pair.close()
        raise LaneTimeout(f"{name}: not agreed on within {deadline_s:.1f} s") from error
    except PairBroken as error:
        pair.close()
        raise LaneError(f"{name}: cannot connect: {error}") from error
    except RuntimeError:  # lanes, drivers, torch
        pair.close()
        raise


def _agree(pair: GlooPair, address: LaneAddress, device: torch.device, until: float) -> SendLane:
    name = gloo.name_of(address)
    probe = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    say(pair, describe(device, probe=probe), until)
    verdict = hear(pair, Verdict, until)
    if verdict.refused:
        raise LaneError(f"{name}: {verdict.refused}")
    logger.info("%s goes over %s (%s)", name, verdict.transport, verdict.why)
    if verdict.transport == "gloo":
        return GlooSendLane(pair, name)
    connection = wire.dial(address.host, verdict.port, verdict.token, until)
    pair.close()
    if verdict.transport == "ipc":
        return WireSendLane(connection, name, device, IpcOutlet(name, device))
    comm = _join(connection, verdict.nccl_id, SENDER, device, name, until)
    return WireSendLane(connection, name, device, NcclOutlet(comm))


def open_wire(pair: GlooPair, host: str, verdict: Verdict, until: float) -> Wire:
    """Tells the sender the verdict and where to connect to, and waits for it. The group has done its work then."""
    token = secrets.token_bytes(wire.TOKEN_BYTES)
    with wire.listen(host) as listening:
        port = listening.getsockname()[1]
        say(pair, msgspec.structs.replace(verdict, port=port, token=token), until)
        connection = wire.accept(listening, token, until)
    pair.close()
    return connection


def describe(device: torch.device, *, probe: torch.Tensor | None = None, tried: Side | None = None) -> Side:
    """This process as one end of a lane. A trainer exports `probe`, an engine opens the one of the trainer `tried`."""
    own = Side(host=Path("/proc/sys/kernel/random/boot_id").read_text().strip(), pid=os.getpid())
    if device.type != "cuda":
        return own
    own = msgspec.structs.replace(
        own,
        gpu=str(torch.cuda.get_device_properties(device).uuid),
        nccl=nccl_library.version(),
        nccl_host=os.environ.get("NCCL_HOSTID", ""),
    )
    driver = Driver(device.index)
    try:
        if probe is not None:
            return msgspec.structs.replace(own, handle=driver.export(probe.data_ptr())[0])
        if tried is not None and tried.handle and (tried.host, tried.pid) != (own.host, own.pid):
            driver.forget(driver.open(tried.handle))
    except DriverError as error:
        return msgspec.structs.replace(own, unshared=f"the trainer's GPU memory cannot be shared: {error}")
    finally:
        driver.close()
    return own


def with_index(device: torch.device) -> torch.device:
    """`cuda:0` for `cuda`."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _join(connection: Wire, identity: bytes, rank: int, device: torch.device, name: str, until: float) -> NcclComm:
    try:
        return NcclComm(identity, rank, device, until)
    except NcclError as error:
        connection.close()
        raise LaneError(f"{name}: no NCCL communicator: {error}") from error


def say(pair: GlooPair, word: msgspec.Struct, until: float) -> None:
    raw = msgspec.json.encode(word)
    wait(pair.post_send(as_bytes(raw.ljust(_HELLO_BYTES)), _HELLO_TAG), until)


def hear(pair: GlooPair, kind: type[Said], until: float) -> Said:
    raw = torch.empty(_HELLO_BYTES, dtype=torch.uint8)
    wait(pair.post_receive(raw, _HELLO_TAG), until)
    try:
        return msgspec.json.decode(raw.numpy().tobytes().rstrip(), type=kind)
    except msgspec.DecodeError as error:
        raise PairBroken(f"the other end said what is no {kind.__name__}: {error}") from error
