"""What every transport must do, with the sender in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megastream.protocol.lane import LaneAddress, LaneError, LaneTimeout
from tests.contract.lanes import HOST, SLOT, TRANSPORTS, connect, content, header, receiver, start_sender

SOON_S = 2.0
"""A dead peer is noticed within this time."""


class Link:
    """The receiving end in this process and the senders it is connected to."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.receiver = receiver(transport)
        self.lanes: list[Any] = []
        self.senders: list[Any] = []

    def open(self, script: Callable[..., Any], *args: Any, source: int = 3) -> tuple[Any, Any]:
        sender = start_sender(self.transport, self.receiver.address(source), script, *args)
        self.senders.append(sender)
        self.lanes.append(self.receiver.accept(source, 20.0))
        return self.lanes[-1], sender

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        self.receiver.close()
        for sender in self.senders:
            sender.end()


@pytest.fixture(params=sorted(TRANSPORTS))
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    link = Link(request.param)
    yield link
    link.close()


def receive(lane: Any, deadline_s: float = 10.0) -> tuple[Any, torch.Tensor]:
    got = lane.receive_header(deadline_s)
    assert got is not None
    into = torch.full((got.num_bytes,), 255, dtype=torch.uint8)
    lane.receive_payload(got, into, deadline_s)
    lane.acknowledge(got)
    return got, into


def send_sizes(lane: Any, pipe: Any, sizes: list[int]) -> dict[str, int]:
    for seq, size in enumerate(sizes):
        payload = content(seq, size)
        lane.send(header(seq, payload), payload, 10.0)
    counters = lane.counters
    return {"pieces": counters.pieces, "payload": counters.payload_bytes, "header": counters.header_bytes}


def test_values_order_and_sizes(link: Link) -> None:
    sizes = [1, 2, 511, 512, 513, 4096, SLOT - 1, SLOT, SLOT + 1, 1_000_003, 3 * SLOT + 7]
    lane, sender = link.open(send_sizes, sizes)
    for seq, size in enumerate(sizes):
        got, into = receive(lane)
        assert (got.seq, got.num_bytes, got.unit) == (seq, size, "s0.l3.e0:8")
        assert torch.equal(into, content(seq, size))
    assert lane.receive_header(5.0) is None
    counters = sender.result()
    assert counters == {"pieces": len(sizes), "payload": sum(sizes), "header": lane.counters.header_bytes}
    assert (lane.counters.pieces, lane.counters.payload_bytes) == (len(sizes), sum(sizes))
    assert 512 * len(sizes) <= lane.counters.header_bytes <= 600 * len(sizes)


def send_from_one_buffer(lane: Any, pipe: Any, count: int) -> None:
    buffer = torch.empty(SLOT, dtype=torch.uint8)
    for seq in range(count):
        buffer.copy_(content(seq, SLOT))
        lane.send(header(seq, buffer), buffer, 10.0)
        buffer.fill_(0)  # at once: the bytes must be on the other side by now


def test_the_senders_buffer_is_free_after_send(link: Link) -> None:
    lane, _ = link.open(send_from_one_buffer, 4)
    received = [receive(lane)[1] for _ in range(4)]
    for seq, into in enumerate(received):
        assert torch.equal(into, content(seq, SLOT))
    assert len({into.data_ptr() for into in received}) == 4


def test_only_the_piece_is_written(link: Link) -> None:
    lane, _ = link.open(send_sizes, [1000])
    got = lane.receive_header(5.0)
    slot = torch.full((4096,), 255, dtype=torch.uint8)
    lane.receive_payload(got, slot, 5.0)
    lane.acknowledge(got)
    assert torch.equal(slot[:1000], content(0, 1000))
    assert bool((slot[1000:] == 255).all())


def send_odd_tensors(lane: Any, pipe: Any) -> list[str]:
    base = content(0, 4096)
    odd = {
        "transposed": base.view(64, 64).t(),
        "strided": base[::2],
        "expanded": base[:1].expand(64),
        "two-dimensional": base.view(64, 64),
        "empty": base[:0],
        "zero-dimensional": base[0],
        "float": base.view(torch.float32),
        "signed": base.view(torch.int8),
        "too short": base[:10],
    }
    refused = []
    for name, tensor in odd.items():
        fields = {"num_bytes": 11} if name == "too short" else {}
        try:
            lane.send(header(0, tensor, checksum=0, **fields), tensor, 5.0)
        except ValueError as error:
            refused.append(f"{name}: {error}")
    offset = base[100:200]  # a storage offset is fine
    lane.send(header(1, offset), offset, 5.0)
    return refused


def test_a_payload_that_is_not_flat_bytes_is_refused_by_name(link: Link) -> None:
    lane, sender = link.open(send_odd_tensors)
    got, into = receive(lane)
    assert got.seq == 1
    assert torch.equal(into, content(0, 4096)[100:200])
    refused = sender.result()
    assert len(refused) == 9
    assert all("s0.l3.e0:8" in text and "trainer 3 -> engine 1" in text for text in refused)
    assert "not contiguous" in next(text for text in refused if text.startswith("strided"))


def send_timed(lane: Any, pipe: Any, count: int) -> list[float]:
    payload = content(0, SLOT)
    times = []
    for seq in range(count):
        started = time.monotonic()
        lane.send(header(seq, payload), payload, 20.0)
        times.append(time.monotonic() - started)
    return times


def test_a_slow_receiver_blocks_the_sender_and_loses_nothing(link: Link) -> None:
    lane, sender = link.open(send_timed, 3)
    for seq in range(3):
        time.sleep(0.4)
        assert receive(lane)[0].seq == seq
    assert all(seconds > 0.3 for seconds in sender.result()[1:])  # the first one starts at its own time


def send_corrupt(lane: Any, pipe: Any) -> str:
    payload = content(0, SLOT)
    wrong = header(0, payload)
    payload[SLOT // 2] ^= 1
    try:
        lane.send(wrong, payload, 10.0)
    except LaneError as error:
        return f"{type(error).__name__}: {error}"
    return "sent"


def test_one_flipped_bit_is_detected_and_told_to_both_ends(link: Link) -> None:
    lane, sender = link.open(send_corrupt)
    got = lane.receive_header(5.0)
    with pytest.raises(LaneError, match=r"s0\.l3\.e0:8.*checksum") as caught:
        lane.receive_payload(got, torch.empty(SLOT, dtype=torch.uint8), 5.0)
    lane.acknowledge(got, str(caught.value))
    said = sender.result()
    assert said.startswith("LaneError") and "was refused" in said and "checksum" in said


def send_twice(lane: Any, pipe: Any) -> list[str]:
    payload = content(0, SLOT)
    said = []
    for seq in range(2):
        try:
            lane.send(header(seq, payload), payload, 10.0)
            said.append("sent")
        except LaneError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("read_first", [True, False])
def test_a_refusal_reaches_the_sender(link: Link, read_first: bool) -> None:
    lane, sender = link.open(send_twice)
    got = lane.receive_header(5.0)
    if read_first:
        lane.receive_payload(got, torch.empty(SLOT, dtype=torch.uint8), 5.0)
    lane.acknowledge(got, "attachment a1 has ended")
    if read_first:
        assert receive(lane)[0].seq == 1
    said = sender.result()
    assert "attachment a1 has ended" in said[0]
    assert (said[1] == "sent") if read_first else ("attachment a1 has ended" in said[1])


def test_an_address_that_leads_nowhere_is_refused_at_once(link: Link) -> None:
    good = link.receiver.address(3)
    started = time.monotonic()
    with pytest.raises(LaneError, match="no such lane"):
        connect(link.transport, LaneAddress(good.transport, good.host, good.port, "trainer3-0000"), 5.0)
    with pytest.raises(LaneError, match="transport carrier-pigeon"):
        connect(link.transport, LaneAddress("carrier-pigeon", good.host, good.port, good.key), 5.0)
    replaced = link.receiver.address(3)
    with pytest.raises(LaneError, match="no such lane"):
        connect(link.transport, good, 5.0)
    link.receiver.close()
    with pytest.raises(LaneError, match=f"{replaced.port}"):
        connect(link.transport, replaced, 5.0)
    assert time.monotonic() - started < 3.0


def test_nobody_comes(link: Link) -> None:
    address = link.receiver.address(3)
    with pytest.raises(LaneTimeout, match=rf"trainer 3 -> {HOST}.*nobody connected within 0\.5 s"):
        link.receiver.accept(3, 0.5)
    with pytest.raises(LaneError, match="no such lane"):
        connect(link.transport, address, 5.0)
    with pytest.raises(LaneTimeout, match=r"not accepted within 0\.5 s"):
        connect(link.transport, link.receiver.address(3), 0.5)


def wait_for_word(lane: Any, pipe: Any) -> None:
    pipe.recv()
    payload = content(0, 100)
    lane.send(header(0, payload), payload, 10.0)


def test_an_idle_deadline_leaves_the_lane_usable(link: Link) -> None:
    lane, sender = link.open(wait_for_word)
    for _ in range(3):
        with pytest.raises(LaneTimeout, match=r"trainer3|trainer 3.*0\.1 s"):
            lane.receive_header(0.1)
    sender.pipe.send("go")
    assert torch.equal(receive(lane)[1], content(0, 100))
    assert lane.receive_header(5.0) is None


def send_impatiently(lane: Any, pipe: Any) -> list[str]:
    payload = content(0, SLOT)
    said = []
    for seq in range(2):
        try:
            lane.send(header(seq, payload), payload, 0.3)
        except LaneError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_send_deadline_names_both_ends_and_the_seconds(link: Link) -> None:
    _, sender = link.open(send_impatiently)
    said = sender.result()
    assert said[0].startswith("LaneTimeout: lane trainer 3 -> engine 1: ") and "0.3 s" in said[0]
    assert said[1].startswith("LaneError") and "0.3 s" in said[1]


def send_forever(lane: Any, pipe: Any) -> str:
    payload = torch.ones(64 * SLOT, dtype=torch.uint8)
    made = header(0, payload)
    pipe.send("ready")
    while True:
        try:
            lane.send(made, payload, 60.0)
        except LaneError as error:
            return f"{time.monotonic()} {error}"


def test_a_payload_deadline_names_both_ends_and_the_seconds(link: Link) -> None:
    lane, sender = link.open(send_forever)
    got = lane.receive_header(5.0)
    sender.result()
    os.kill(sender.process.pid, signal.SIGSTOP)
    with pytest.raises(LaneTimeout, match=r"trainer 3 -> engine 1.*s0\.l3\.e0:8.*0\.5 s"):
        lane.receive_payload(got, torch.empty(got.num_bytes, dtype=torch.uint8), 0.5)
    with pytest.raises(LaneError, match=r"0\.5 s"):
        lane.receive_header(1.0)


def say_and_sleep(lane: Any, pipe: Any) -> None:
    pipe.send("ready")
    time.sleep(60)


def test_a_sender_killed_while_the_receiver_is_idle(link: Link) -> None:
    lane, sender = link.open(say_and_sleep)
    sender.result()
    threading.Timer(0.3, sender.process.kill).start()
    started = time.monotonic()
    with pytest.raises(LaneError, match="the peer is gone") as caught:
        lane.receive_header(30.0)
    assert not isinstance(caught.value, LaneTimeout)
    assert time.monotonic() - started < 0.3 + SOON_S


@pytest.mark.parametrize("after_s", [0.005, 0.03])
def test_a_sender_killed_in_the_middle_of_a_payload(link: Link, after_s: float) -> None:
    lane, sender = link.open(send_forever)
    sender.result()
    into = torch.empty(64 * SLOT, dtype=torch.uint8)
    threading.Timer(after_s, sender.process.kill).start()
    started = time.monotonic()
    with pytest.raises(LaneError, match="trainer.*the peer is gone"):
        while True:
            got = lane.receive_header(30.0)
            lane.receive_payload(got, into, 30.0)
            lane.acknowledge(got)
    assert time.monotonic() - started < after_s + SOON_S


def receive_and_die(transport: str, pipe: Any, when: str) -> None:
    """The receiving end as a process that kills itself."""
    end = receiver(transport)
    pipe.send(end.address(3))
    lane = end.accept(3, 20.0)
    got = lane.receive_header(20.0)
    if when == "in the middle":
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
        lane.receive_payload(got, torch.empty(got.num_bytes, dtype=torch.uint8), 20.0)
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["before the payload", "in the middle"])
def test_a_receiver_killed_while_the_sender_waits(when: str, link: Link) -> None:
    from tests.contract.lanes import _processes

    ours, theirs = _processes.Pipe()
    victim = _processes.Process(target=receive_and_die, args=(link.transport, theirs, when), daemon=True)
    victim.start()
    assert ours.poll(20)
    lane = connect(link.transport, ours.recv())
    payload = torch.ones(256 * SLOT, dtype=torch.uint8)
    made = header(0, payload)
    started = time.monotonic()
    try:
        with pytest.raises(LaneError, match="trainer 3 -> engine 1.*the peer is gone"):
            lane.send(made, payload, 30.0)
        assert time.monotonic() - started < SOON_S
        with pytest.raises(LaneError, match="the peer is gone"):
            lane.send(made, payload, 30.0)
    finally:
        lane.close()
        victim.kill()
        victim.join(10)


@pytest.mark.parametrize("where", ["header", "payload"])
def test_abort_from_another_thread(link: Link, where: str) -> None:
    lane, sender = link.open(send_forever if where == "payload" else say_and_sleep)
    sender.result()
    threading.Timer(0.4, lane.abort).start()
    started = time.monotonic()
    with pytest.raises(LaneError, match="aborted"):
        got = lane.receive_header(30.0)
        os.kill(sender.process.pid, signal.SIGSTOP)
        lane.receive_payload(got, torch.empty(got.num_bytes, dtype=torch.uint8), 30.0)
    assert time.monotonic() - started < 0.4 + SOON_S
    os.kill(sender.process.pid, signal.SIGCONT)
    lane.abort()


def test_the_receiver_closes_first(link: Link) -> None:
    lane, sender = link.open(send_forever)
    sender.result()
    receive(lane)
    closed = time.monotonic()
    lane.close()
    lane.close()
    at, text = sender.result().split(" ", 1)
    assert "the peer is gone" in text
    assert float(at) - closed < SOON_S
    with pytest.raises(LaneError, match="closed"):
        lane.receive_header(1.0)


def test_lanes_of_several_senders_do_not_mix(link: Link) -> None:
    senders = {source: link.open(send_sizes, [source * 1000 + 1] * 3, source=source) for source in (0, 1, 2)}
    for seq in range(3):
        for source in (2, 0, 1):
            got, into = receive(senders[source][0])
            assert got.seq == seq
            assert torch.equal(into, content(seq, source * 1000 + 1))


def open_and_close(lane: Any, pipe: Any) -> None:
    payload = content(0, 100)
    lane.send(header(0, payload), payload, 10.0)


def threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def cycle(transport: str) -> None:
    """One lane with both ends in this process."""
    end = receiver(transport)
    address = end.address(3)
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(connect(transport, address)))
    thread.start()
    lane = end.accept(3, 10.0)
    thread.join(10)
    made[0].close()
    assert lane.receive_header(5.0) is None
    lane.close()
    end.close()


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_fifty_lanes_leave_no_thread_and_no_file(transport: str) -> None:
    cycle(transport)
    before = threads_and_files()
    for _ in range(50):
        cycle(transport)
    assert threads_and_files() <= before
