"""Several pieces under way on a lane: one order, a bound, one word for each."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import torch

from megastream.protocol.lane import LaneError
from megastream.transport import wire
from megastream.transport.gloo_pair import PairBroken
from tests.contract.lanes import SLOT, Link, begin, content, outcome, post, post_many, receive


def test_a_full_window_keeps_the_order(wide: Link) -> None:
    count = 11
    lane, sender = wide.open(post_many, count)
    begun, seen = begin(lane, min(lane.window, count)), 0
    while begun:
        got, into = begun.pop(0)
        lane.finish_payload(got, 10.0)
        assert got.seq == seen and torch.equal(into.cpu(), content(seen, SLOT + seen))
        lane.acknowledge(got)
        seen += 1
        if seen + len(begun) < count:
            begun += begin(lane, 1)
    assert seen == count and lane.receive_header(5.0) is None
    assert sender.result() == ["ok"] * count
    assert (lane.counters.pieces, lane.counters.payload_bytes) == (count, sum(SLOT + seq for seq in range(count)))


def post_too_many(lane: Any, pipe: Any) -> tuple[str, str, int]:
    kept = [post(lane, seq) for seq in range(lane.window)]
    try:
        kept.append(post(lane, 99))
        said = "posted"
    except ValueError as error:
        said = str(error)
    for _ in range(lane.window):
        assert outcome(lane) == "ok"
    return said, outcome(lane), lane.counters.pieces


@pytest.mark.full
def test_no_more_than_the_window_is_under_way(link: Link) -> None:
    lane, sender = link.open(post_too_many)
    assert [receive(lane)[0].seq for _ in range(lane.window)] == list(range(lane.window))
    said, nothing, pieces = sender.result()
    assert "lane trainer 3 -> engine 1, unit s0.l3.e0:8 of version 7, piece 99" in said and "under way" in said
    assert nothing.startswith("ValueError") and "nothing is under way" in nothing
    assert pieces == lane.window and lane.receive_header(5.0) is None


def post_with_one_corrupt(lane: Any, pipe: Any) -> list[str]:
    kept = [post(lane, 0), post(lane, 1, checksum=12345), post(lane, 2)]
    assert len(kept) == 3
    return [outcome(lane) for _ in range(3)]


def test_one_of_three_under_way_is_corrupt(wide: Link) -> None:
    lane, sender = wide.open(post_with_one_corrupt)
    for got, into in begin(lane, 3):
        if got.seq == 1:
            with pytest.raises(LaneError, match="piece 1: checksum .* sent 0000000000003039") as caught:
                lane.finish_payload(got, 10.0)
            lane.acknowledge(got, str(caught.value))
        else:
            lane.finish_payload(got, 10.0)
            assert torch.equal(into.cpu(), content(got.seq, SLOT))
            lane.acknowledge(got)
    said = sender.result()
    assert (said[0], said[2]) == ("ok", "ok")
    assert "piece 1 was refused" in said[1] and "checksum" in said[1]
    assert lane.counters.pieces == 2


@pytest.mark.full
def test_payloads_are_finished_in_the_order_in_which_they_were_begun(wide: Link) -> None:
    lane, _ = wide.open(post_many, 2)
    (first, _), (second, _) = begun = begin(lane, 2)
    with pytest.raises(ValueError, match="piece 1: it is not the oldest payload"):
        lane.finish_payload(second, 10.0)
    for got, _ in begun:
        lane.finish_payload(got, 10.0)
        lane.acknowledge(got)
    assert first.seq == 0


def test_a_stranger_on_the_wire_s_port_is_turned_away() -> None:
    with wire.listen("127.0.0.1") as listening:
        port, token = listening.getsockname()[1], b"t" * wire.TOKEN_BYTES
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(wire.accept(listening, token, time.monotonic() + 10)))
        thread.start()
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(b"x" * wire.TOKEN_BYTES)
        assert stranger.recv(1) == b""
        friend = wire.dial("127.0.0.1", port, token, time.monotonic() + 10)
        thread.join(10)
        friend.send(b"hello", time.monotonic() + 1)
        assert made[0].receive(5, time.monotonic() + 5) == b"hello"
    for end in (stranger, friend, made[0]):
        end.close()


def test_an_answer_is_not_lost_with_the_connection() -> None:
    """A connection closed with bytes unread would be reset, and beyond one machine that can overtake the answer."""
    soon = time.monotonic() + 10
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = wire.Wire(socket.create_connection(listening.getsockname()))
        other = wire.Wire(listening.accept()[0])
    one.send(b"unread", soon)
    while not other.has_message():
        assert time.monotonic() < soon
    other.send(b"answer", soon)
    other.close()
    assert one.receive(6, soon) == b"answer"
    with pytest.raises(PairBroken, match="its connection is closed"):
        one.receive(1, soon)
    assert one.is_gone()
    one.close()
