"""Which transport a lane takes, and the refusals, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from megastream.protocol.lane import LaneAddress, LaneError
from megastream.transport import lanes
from megastream.transport.checksum import weighted_sum
from megastream.transport.choice import Side, choose
from megastream.transport.cuda_driver import DriverError

TRAINER = Side(host="a", pid=1, gpu="g0", nccl=22809)
ENGINE = Side(host="a", pid=2, gpu="g1", nccl=22809)
CPU = torch.device("cpu")


def with_(side: Side, **changes: Any) -> Side:
    return msgspec.structs.replace(side, **changes)


@pytest.mark.parametrize(
    ("trainer", "engine", "chosen", "why"),
    [
        (TRAINER, ENGINE, "ipc", "reads the trainer's memory"),
        (TRAINER, with_(ENGINE, gpu="g0"), "ipc", "one host"),
        (TRAINER, with_(ENGINE, host="b"), "nccl", "not ipc: trainer and engine are on different hosts"),
        (with_(TRAINER, unshared="no peer access"), ENGINE, "nccl", "not ipc: no peer access"),
        (TRAINER, with_(ENGINE, host="b", nccl=22703), "gloo", "trainer has NCCL 2.28.9, the engine 2.27.3"),
        (with_(TRAINER, gpu=""), ENGINE, "gloo", "the trainer rank has no GPU"),
    ],
)
def test_auto_takes_the_fastest_that_both_ends_have(trainer: Side, engine: Side, chosen: str, why: str) -> None:
    transport, reason = choose("auto", trainer, engine)
    assert transport == chosen and why in reason
    assert choose(transport, trainer, engine) == (transport, "as configured")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "trainer", "engine", "message"),
    [
        (
            "ipc",
            TRAINER,
            with_(ENGINE, host="b"),
            "ipc cannot be used: trainer and engine are on different hosts; use nccl",
        ),
        ("ipc", TRAINER, with_(ENGINE, pid=1), "are one process"),
        (
            "ipc",
            TRAINER,
            with_(ENGINE, unshared="no peer access"),
            "ipc cannot be used: no peer access; use nccl or gloo",
        ),
        (
            "nccl",
            TRAINER,
            with_(ENGINE, gpu="g0"),
            "share one GPU, where NCCL takes one rank; use ipc or gloo, or auto",
        ),
        ("nccl", TRAINER, with_(ENGINE, nccl=0), "the trainer has NCCL 2.28.9, the engine none"),
        ("nccl", with_(TRAINER, gpu=""), with_(ENGINE, gpu=""), "the trainer and the engine rank has no GPU; use gloo"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wanted: Any, trainer: Side, engine: Side, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(wanted, trainer, engine)


def test_an_engine_without_a_gpu_refuses_gpu_transports_at_its_start() -> None:
    with pytest.raises(ValueError, match="transport ipc needs an engine on a GPU, and this one is on cpu; use gloo"):
        lanes.Receiver("127.0.0.1", "ipc", CPU)


def test_auto_without_gpus_is_gloo_and_carries_a_piece() -> None:
    """Both ends meet, describe themselves and agree; the lane is a gloo lane."""
    from concurrent.futures import ThreadPoolExecutor

    told: list[str] = []
    end = lanes.Receiver("127.0.0.1", "auto", CPU, say=told.append)
    address = end.address(0)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lanes.connect, address, 10.0, CPU)
        lane = end.accept(address, 10.0)
        sender = sending.result(10)
    assert address.transport == "auto" and lane.device == sender.device == "cpu"
    assert "goes over gloo (not ipc: the trainer and the engine rank has no GPU; not nccl: " in told[0]
    sender.close()
    assert lane.receive_header(5.0) is None
    lane.close()
    end.close()


def test_an_address_of_an_unknown_transport_is_refused() -> None:
    with pytest.raises(LaneError, match="transport carrier-pigeon; known are gloo, nccl, ipc, auto"):
        lanes.connect(lanes.LaneAddress("carrier-pigeon", "127.0.0.1", 1, "k"), 1.0, CPU)


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 1000, 8 * (1 << 16), 8 * (1 << 16) + 3, 3 * 8 * (1 << 16) + 801])
def test_the_weighted_sum_sees_every_change(num_bytes: int) -> None:
    """What GPU lanes hash with: one flipped bit anywhere, two words that changed places, a byte more or less."""
    payload = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    seen = {weighted_sum(payload), weighted_sum(payload[:-1]) if num_bytes > 1 else -1}
    places = sorted({0, num_bytes // 3, num_bytes // 2, num_bytes - 1})
    for at in places:
        changed = payload.clone()
        changed[at] ^= 128
        seen.add(weighted_sum(changed))
    for one, other in ((0, 8), (0, num_bytes // 16 * 8)):
        if other and other + 8 <= num_bytes:
            changed = payload.clone()
            changed[one : one + 8], changed[other : other + 8] = payload[other : other + 8], payload[one : one + 8]
            seen.add(weighted_sum(changed))
    swaps = len({other for other in (8, num_bytes // 16 * 8) if other and other + 8 <= num_bytes})
    assert len(seen) == 2 + len(places) + swaps
    odd = torch.cat([torch.zeros(3, dtype=torch.uint8), payload])[3:]
    assert weighted_sum(odd) == weighted_sum(payload), "wherever the bytes lie"


def test_a_driver_that_fails_leaves_no_end_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise DriverError("cuInit: no device")

    closed: list[str] = []
    pairs: Any = [SimpleNamespace(close=lambda end=end: closed.append(end)) for end in ("trainer", "engine")]
    monkeypatch.setattr(lanes.gloo, "meet", lambda address, deadline_s: pairs[0])
    monkeypatch.setattr(lanes, "hear", lambda *args: TRAINER)
    monkeypatch.setattr(lanes, "describe", fail)
    with pytest.raises(DriverError, match="no device"):
        lanes.connect(LaneAddress("ipc", "localhost", 1, "trainer0-k"), 1.0, CPU)
    receiver = lanes.Receiver("127.0.0.1", "auto", CPU)
    try:
        with pytest.raises(DriverError, match="no device"):
            receiver._lane(pairs[1], "lane", 1.0)
    finally:
        receiver.close()
    assert closed == ["trainer", "engine"]
