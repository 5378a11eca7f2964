"""What every transport must do when a peer is late, dead or gone, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megastream.protocol.lane import LaneAddress, LaneError, LaneTimeout
from tests.contract import SOON_S
from tests.contract.lanes import (
    HOST,
    SLOT,
    Link,
    connect,
    content,
    header,
    processes,
    receive,
    receiver,
    room,
    say_and_sleep,
    send,
    send_sizes,
    start_sender,
    take,
)

ROOT = Path(__file__).parents[2]


def test_nobody_comes(link: Link) -> None:
    address = link.receiver.address(3)
    with pytest.raises(LaneTimeout, match=rf"trainer 3 -> {HOST}.*nobody connected within 0\.5 s"):
        link.receiver.accept(address, 0.5)
    with pytest.raises(LaneError, match="no such lane"):
        connect(link.transport, address, 5.0)
    with pytest.raises(LaneTimeout, match=r"not accepted within 0\.5 s"):
        connect(link.transport, link.receiver.address(3), 0.5)


def waiting(link: Link, address: LaneAddress, outcome: list[str]) -> threading.Thread:
    """A thread that accepts; the text of what that raised."""

    def accept() -> None:
        try:
            link.receiver.accept(address, 60.0)
        except LaneError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=accept)
    thread.start()
    return thread


@pytest.mark.parametrize("how", ["withdrawn", "replaced"])
def test_a_void_address_ends_its_accept_and_leaves_the_next_one(link: Link, how: str) -> None:
    """An attachment that breaks while its lanes open must take neither time nor address from the next one."""
    outcome: list[str] = []
    first = link.receiver.address(3)
    thread = waiting(link, first, outcome)
    time.sleep(0.2)
    if how == "withdrawn":
        link.receiver.withdraw(first)
    second = link.receiver.address(3)
    thread.join(SOON_S)
    assert not thread.is_alive() and "withdrawn while it waited" in outcome[0]
    link.receiver.withdraw(first)  # again, and late: the second address stays
    with pytest.raises(LaneError, match="withdrawn, replaced, or never offered"):
        link.receiver.accept(first, 5.0)
    sender = start_sender(link.transport, second, send_sizes, [100])
    link.senders.append(sender)
    link.lanes.append(link.receiver.accept(second, 60.0))
    assert receive(link.lanes[0])[0].seq == 0 and sender.result()["pieces"] == 1


def wait_for_word(lane: Any, pipe: Any) -> None:
    pipe.recv()
    payload = content(0, 100, lane)
    send(lane, header(0, payload), payload, 10.0)


def test_an_idle_deadline_leaves_the_lane_usable(link: Link) -> None:
    lane, sender = link.open(wait_for_word)
    for _ in range(3):
        with pytest.raises(LaneTimeout, match=r"trainer3|trainer 3.*0\.1 s"):
            lane.receive_header(0.1)
    sender.pipe.send("go")
    assert torch.equal(receive(lane)[1], content(0, 100))
    assert lane.receive_header(5.0) is None


def send_impatiently(lane: Any, pipe: Any) -> list[str]:
    payload = content(0, SLOT, lane)
    said = []
    for seq in range(2):
        try:
            send(lane, header(seq, payload), payload, 0.3)
        except LaneError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_send_deadline_names_both_ends_and_the_seconds(link: Link) -> None:
    _, sender = link.open(send_impatiently)
    said = sender.result()
    assert said[0].startswith("LaneTimeout: lane trainer 3 -> engine 1: ") and "0.3 s" in said[0]
    assert said[1].startswith("LaneError") and "0.3 s" in said[1]


def send_forever(lane: Any, pipe: Any) -> str:
    payload = room(lane, 64 * SLOT, 1)
    made = header(0, payload)
    pipe.send("ready")
    while True:
        try:
            send(lane, made, payload, 60.0)
        except LaneError as error:
            return f"{time.monotonic()} {error}"


def test_a_payload_deadline_names_both_ends_and_the_seconds(link: Link) -> None:
    lane, sender = link.open(send_forever)
    got = lane.receive_header(5.0)
    sender.result()
    os.kill(sender.process.pid, signal.SIGSTOP)
    if link.transport == "ipc":  # copies without its peer
        take(lane, got, room(lane, got.num_bytes), 0.5)
        return
    with pytest.raises(LaneTimeout, match=r"trainer 3 -> engine 1.*s0\.l3\.e0:8.*0\.5 s"):
        take(lane, got, room(lane, got.num_bytes), 0.5)
    with pytest.raises(LaneError, match=r"0\.5 s"):
        lane.receive_header(1.0)


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
    into = room(lane, 64 * SLOT)
    threading.Timer(after_s, sender.process.kill).start()
    started = time.monotonic()
    with pytest.raises(LaneError, match="trainer.*the peer is gone"):
        while True:
            got = lane.receive_header(30.0)
            take(lane, got, into, 30.0)
            lane.acknowledge(got)
    assert time.monotonic() - started < after_s + SOON_S


def receive_and_die(transport: str, pipe: Any, when: str) -> None:
    """The receiving end as a process that kills itself."""
    end = receiver(transport)
    address = end.address(3)
    pipe.send(address)
    lane = end.accept(address, 60.0)
    got = lane.receive_header(60.0)
    if when == "in the middle":
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
        take(lane, got, room(lane, got.num_bytes), 60.0)
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["before the payload", "in the middle"])
def test_a_receiver_killed_while_the_sender_waits(when: str, link: Link) -> None:
    ours, theirs = processes.Pipe()
    victim = processes.Process(target=receive_and_die, args=(link.transport, theirs, when), daemon=True)
    victim.start()
    assert ours.poll(60)
    lane = connect(link.transport, ours.recv())
    payload = room(lane, 256 * SLOT, 1)
    made = header(0, payload)
    started = time.monotonic()
    try:
        with pytest.raises(LaneError, match="trainer 3 -> engine 1.*the peer is gone"):
            send(lane, made, payload, 30.0)
        assert time.monotonic() - started < SOON_S
        with pytest.raises(LaneError, match="the peer is gone"):
            send(lane, made, payload, 30.0)
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
        take(lane, got, room(lane, got.num_bytes), 30.0)
        lane.receive_header(30.0)  # over ipc the bytes came without the peer
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


FORGETFUL = """
import sys
from tests.contract.lanes import receiver
end = receiver(sys.argv[1])
address = end.address(3)
print(address.port, address.key, flush=True)
lane = end.accept(address, 60.0)
try:
    lane.receive_header(0.1)
except RuntimeError as error:
    print(error, flush=True)
"""


def test_a_forgotten_lane_does_not_hold_up_the_exit(link: Link) -> None:
    """Ends without closing anything while the sender idles."""
    forgetful = subprocess.Popen(
        [sys.executable, "-c", FORGETFUL, link.transport], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert forgetful.stdout is not None
    port, key = forgetful.stdout.readline().split()
    lane = connect(link.transport, LaneAddress(link.transport, HOST, int(port), key))
    try:
        assert "0.1 s" in forgetful.stdout.readline()
        assert forgetful.wait(30) == 0
    finally:
        forgetful.kill()
        forgetful.stdout.close()
        lane.close()
