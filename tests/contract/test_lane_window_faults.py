"""What a lane must do when something goes wrong while several pieces are under way."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from megastream.protocol.lane import LaneError
from tests.contract import SOON_S
from tests.contract.lanes import (
    SLOT,
    Link,
    begin,
    connect,
    outcome,
    post,
    post_many,
    processes,
    receive,
    receiver,
)


def post_two_slowly_answered(lane: Any, pipe: Any) -> list[str]:
    kept = [post(lane, seq) for seq in range(2)]
    assert len(kept) == 2
    return [outcome(lane, 10.0), outcome(lane, 0.3), outcome(lane, 0.3)]


@pytest.mark.full
def test_a_deadline_names_the_piece_that_was_waited_for(wide: Link) -> None:
    lane, sender = wide.open(post_two_slowly_answered)
    receive(lane)
    first, second, third = sender.result()
    assert first == "ok"
    assert second.startswith("LaneTimeout: lane trainer 3 -> engine 1: ") and "piece 1: nothing within 0.3 s" in second
    assert third.startswith("LaneError") and "piece 1" in third


def fill_and_sleep(lane: Any, pipe: Any) -> None:
    kept = [post(lane, seq, 8 * SLOT) for seq in range(lane.window)]
    pipe.send("ready")
    outcome(lane, 60.0)
    del kept


@pytest.mark.full
@pytest.mark.parametrize("begun", [0, 2])
def test_a_sender_killed_with_a_full_window(wide: Link, begun: int) -> None:
    lane, sender = wide.open(fill_and_sleep)
    sender.result()
    coming = begin(lane, begun)
    sender.process.kill()
    started = time.monotonic()
    with pytest.raises(LaneError, match="trainer.*the peer is gone"):
        for got, _ in coming:
            lane.finish_payload(got, 30.0)
            lane.acknowledge(got)
        while True:
            receive(lane, 30.0)
    assert time.monotonic() - started < SOON_S


def begin_and_die(transport: str, pipe: Any, begun: int) -> None:
    end = receiver(transport)
    address = end.address(3)
    pipe.send(address)
    lane = end.accept(address, 60.0)
    begin(lane, begun)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("begun", [0, 2])
def test_a_receiver_killed_with_a_full_window(wide: Link, begun: int) -> None:
    ours, theirs = processes.Pipe()
    victim = processes.Process(target=begin_and_die, args=(wide.transport, theirs, begun), daemon=True)
    victim.start()
    assert ours.poll(60)
    lane = connect(wide.transport, ours.recv())
    try:
        kept = [post(lane, seq, 8 * SLOT) for seq in range(lane.window)]
        started = time.monotonic()
        with pytest.raises(LaneError, match="piece 0: the peer is gone"):
            lane.acknowledged(30.0)
        assert time.monotonic() - started < 10 + SOON_S and len(kept) == lane.window  # it may still be starting
        with pytest.raises(LaneError, match="the peer is gone"):
            post(lane, 9)
    finally:
        lane.close()
        victim.kill()
        victim.join(10)


def post_and_close(lane: Any, pipe: Any) -> str:
    kept = [post(lane, seq) for seq in range(lane.window)]
    lane.close()
    pipe.send("closed")
    pipe.recv()  # the memory stays
    return outcome(lane) if kept else ""


@pytest.mark.full
def test_closing_with_pieces_under_way_is_no_regular_end(link: Link) -> None:
    lane, sender = link.open(post_and_close)
    assert sender.result() == "closed"
    with pytest.raises(LaneError, match="the peer is gone"):
        while lane.receive_header(10.0) is not None:
            pass
        pytest.fail("it ended regularly")
    sender.pipe.send("go")
    assert "closed" in sender.result()


def close_under_a_waiting_thread(lane: Any, pipe: Any) -> tuple[str, float]:
    kept = [post(lane, seq) for seq in range(lane.window)]
    threading.Timer(0.2, lane.close).start()
    started = time.monotonic()
    said = outcome(lane, 30.0)
    return said, time.monotonic() - started if kept else 0.0


@pytest.mark.full
def test_closing_wakes_whoever_waits_for_an_acknowledgement(link: Link) -> None:
    _, sender = link.open(close_under_a_waiting_thread)
    said, seconds = sender.result()
    assert said.startswith("LaneError") and "closed with" in said
    assert seconds < 0.2 + SOON_S


@pytest.mark.full
def test_the_receiver_closes_with_pieces_under_way(wide: Link) -> None:
    lane, sender = wide.open(post_many, 3)
    got, _ = begin(lane, 2)[0]
    lane.finish_payload(got, 10.0)
    lane.acknowledge(got, "no more room")
    lane.close()
    said = sender.result()
    assert "piece 0 was refused: no more room" in said[0], "the last word is not lost with the connection"
    assert "piece 1: the peer is gone" in said[1]


@pytest.mark.full
def test_abort_ends_both_threads_of_a_receiver(wide: Link) -> None:
    lane, _ = wide.open(post_many, 1)
    got, _ = begin(lane, 1)[0]
    lane.finish_payload(got, 10.0)
    threading.Timer(0.2, lane.abort).start()
    with pytest.raises(LaneError, match="aborted"):
        lane.receive_header(30.0)
    with pytest.raises(LaneError, match="aborted"):
        lane.acknowledge(got)
