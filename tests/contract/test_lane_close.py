"""Both ends of a lane close at the same moment, as they do when an attachment is detached: neither may wait for ever.

gloo forgets a message that is on the way when the peer's socket closes. Once in some hundred closings the sender's
last header was such a message, and the thread that carried it kept the sender for as long as the group's timeout.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import pytest

from megastream.protocol.lane import LaneError
from megastream.transport.gloo import GlooReceiver, connect
from megastream.transport.lane_end import CLOSE_GRACE_S

SPREAD_S = 0.0004
"""The two ends close within this time of each other."""


def close_often(pipe: Any) -> None:
    """The sender's process: connects to every address and closes at once; says how long that took."""
    pipe.send("ready")
    while (address := pipe.recv()) is not None:
        lane = connect(address, 20)
        pipe.send("up")
        pipe.recv()
        time.sleep(random.random() * SPREAD_S)
        started = time.monotonic()
        lane.close()
        pipe.send(time.monotonic() - started)


def idle(lane: Any) -> None:
    with suppress(LaneError):
        lane.receive_header(30)


@pytest.mark.parametrize("closings", [25, pytest.param(400, marks=(pytest.mark.full, pytest.mark.timeout(600)))])
def test_both_ends_close_at_once(closings: int) -> None:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=close_often, args=(theirs,), daemon=True)
    sender.start()
    receiver = GlooReceiver("127.0.0.1")
    try:
        assert ours.poll(200) and ours.recv() == "ready", "its imports are not a lane's time"
        for number in range(closings):
            address = receiver.address(0)
            ours.send(address)
            lane = receiver.accept(address, 20)
            waiting = threading.Thread(target=idle, args=(lane,))
            waiting.start()
            assert ours.recv() == "up"
            ours.send("close")
            time.sleep(random.random() * SPREAD_S)
            lane.abort()
            lane.close()
            waiting.join(10)
            assert not waiting.is_alive(), f"the receiver still waits after closing {number}"
            assert ours.poll(CLOSE_GRACE_S + 20), f"the sender still closes after closing {number}"
            assert ours.recv() < CLOSE_GRACE_S + 10
        ours.send(None)
        sender.join(20)
        assert sender.exitcode == 0
    finally:
        sender.kill()
        receiver.close()
