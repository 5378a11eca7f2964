"""What every transport must do, with the sender in a process of its own."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megastream.protocol.lane import LaneAddress, LaneError
from tests.contract import SOON_S
from tests.contract.lanes import (
    HAS_GPU,
    SLOT,
    Link,
    connect,
    content,
    header,
    ready,
    receive,
    room,
    say_and_sleep,
    send,
    send_sizes,
    take,
)


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
    buffer = room(lane, SLOT)
    for seq in range(count):
        ready(buffer.copy_(content(seq, SLOT)))
        send(lane, header(seq, buffer), buffer, 10.0)
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
    slot = room(lane, 4096)
    take(lane, got, slot, 5.0)
    lane.acknowledge(got)
    slot = slot.cpu()
    assert torch.equal(slot[:1000], content(0, 1000))
    assert bool((slot[1000:] == 255).all())


def send_odd_tensors(lane: Any, pipe: Any) -> list[str]:
    base = content(0, 4096, lane)
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
            send(lane, header(0, tensor, checksum=0, **fields), tensor, 5.0)
        except ValueError as error:
            refused.append(f"{name}: {error}")
    offset = base[100:200]  # a storage offset is fine
    send(lane, header(1, offset), offset, 5.0)
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
    payload = content(0, SLOT, lane)
    times = []
    for seq in range(count):
        started = time.monotonic()
        send(lane, header(seq, payload), payload, 20.0)
        times.append(time.monotonic() - started)
    return times


def test_a_slow_receiver_blocks_the_sender_and_loses_nothing(link: Link) -> None:
    lane, sender = link.open(send_timed, 3)
    for seq in range(3):
        time.sleep(0.4)
        assert receive(lane)[0].seq == seq
    assert all(seconds > 0.3 for seconds in sender.result()[1:])  # the first one starts at its own time


def send_corrupt(lane: Any, pipe: Any) -> str:
    payload = content(0, SLOT, lane)
    wrong = header(0, payload)
    payload[SLOT // 2] ^= 1
    ready(payload)
    try:
        send(lane, wrong, payload, 10.0)
    except LaneError as error:
        return f"{type(error).__name__}: {error}"
    return "sent"


def test_one_flipped_bit_is_detected_and_told_to_both_ends(link: Link) -> None:
    lane, sender = link.open(send_corrupt)
    got = lane.receive_header(5.0)
    with pytest.raises(LaneError, match=r"s0\.l3\.e0:8.*checksum") as caught:
        take(lane, got, room(lane, SLOT), 5.0)
    lane.acknowledge(got, str(caught.value))
    said = sender.result()
    assert said.startswith("LaneError") and "was refused" in said and "checksum" in said


def send_twice(lane: Any, pipe: Any) -> list[str]:
    payload = content(0, SLOT, lane)
    said = []
    for seq in range(2):
        try:
            send(lane, header(seq, payload), payload, 10.0)
            said.append("sent")
        except LaneError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("read_first", [True, False])
def test_a_refusal_reaches_the_sender(link: Link, read_first: bool) -> None:
    lane, sender = link.open(send_twice)
    got = lane.receive_header(5.0)
    if read_first:
        take(lane, got, room(lane, SLOT), 5.0)
    lane.acknowledge(got, "attachment a1 has ended")
    goes_on = read_first or link.transport != "gloo"  # gloo cannot skip a payload
    if goes_on:
        assert receive(lane)[0].seq == 1
    said = sender.result()
    assert "attachment a1 has ended" in said[0]
    assert (said[1] == "sent") if goes_on else ("attachment a1 has ended" in said[1])


def ends_in_error(link: Link, address: LaneAddress) -> None:
    with pytest.raises(LaneError, match="withdrawn while it waited"):
        link.receiver.accept(address, 60.0)


def test_an_address_that_leads_nowhere_is_refused_at_once(link: Link) -> None:
    good = link.receiver.address(3)
    accepting = threading.Thread(target=ends_in_error, args=(link, good))
    accepting.start()
    started = time.monotonic()
    with pytest.raises(LaneError, match="no such lane"):
        connect(link.transport, LaneAddress(good.transport, good.host, good.port, "trainer3-0000"), 30.0)
    with pytest.raises(LaneError, match="transport carrier-pigeon"):
        connect(link.transport, LaneAddress("carrier-pigeon", good.host, good.port, good.key), 30.0)
    assert accepting.is_alive(), "a stranger does not use the address up"
    replaced = link.receiver.address(3)
    accepting.join(SOON_S)
    assert not accepting.is_alive()
    with pytest.raises(LaneError, match="no such lane"):
        connect(link.transport, good, 30.0)
    link.receiver.close()
    with pytest.raises(LaneError, match=f"{replaced.port}"):
        connect(link.transport, replaced, 30.0)
    assert time.monotonic() - started < SOON_S


def test_lanes_of_several_senders_do_not_mix(link: Link) -> None:
    senders = {source: link.open(send_sizes, [source * 1000 + 1] * 3, source=source) for source in (0, 1, 2)}
    for seq in range(3):
        for source in (2, 0, 1):
            got, into = receive(senders[source][0])
            assert got.seq == seq
            assert torch.equal(into, content(seq, source * 1000 + 1))


def send_beside_a_default_group(lane: Any, pipe: Any) -> str:
    """What a Megatron rank is: a process with a default group of its own, sending from a thread."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = torch.ones(1000)
    thread = threading.Thread(target=send_sizes, args=(lane, pipe, [SLOT] * 5))
    thread.start()
    while thread.is_alive():
        dist.all_reduce(own)
    dist.destroy_process_group()
    return "default group untouched" if float(own.sum()) == 1000 else "default group disturbed"


def test_a_lane_beside_a_default_group_and_in_a_thread(link: Link) -> None:
    lane, sender = link.open(send_beside_a_default_group)
    received: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: received.extend(receive(lane)[1] for _ in range(5)))
    thread.start()
    thread.join(20)
    assert all(torch.equal(into, content(seq, SLOT)) for seq, into in enumerate(received)) and len(received) == 5
    assert sender.result() == "default group untouched"
    assert not dist.is_initialized()


def test_nothing_listens_beyond_the_given_host(link: Link) -> None:
    link.open(say_and_sleep)
    link.receiver.address(4)  # what waits for the next lane listens, too
    own = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if is_socket(fd)}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[9]) in own:
                listening.append(fields[1].split(":")[0])
    assert listening and set(listening) == {"0100007F"}  # 127.0.0.1


def is_socket(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_auto_between_processes_of_one_host_reads_the_trainer_s_memory() -> None:
    link = Link("auto")
    try:
        lane, sender = link.open(send_sizes, [SLOT])
        assert type(lane._intake).__name__ == "IpcIntake" and link.receiver.address(3).transport == "auto"
        assert torch.equal(receive(lane)[1], content(0, SLOT))
        assert sender.result()["pieces"] == 1
    finally:
        link.close()
