"""A process forked while lanes are open lacks gloo's threads; it must be able to forget the lanes all the same."""

from __future__ import annotations

import gc
import os
import signal
import time
from threading import Thread
from typing import Any

import pytest

from megastream.transport.gloo import GlooReceiver, connect

DEADLINE_S = 20.0


def open_lane() -> list[Any]:
    receiver, sender = GlooReceiver("127.0.0.1"), []
    address = receiver.address(0)
    connecting = Thread(target=lambda: sender.append(connect(address, DEADLINE_S)))
    connecting.start()
    lane = receiver.accept(address, DEADLINE_S)
    connecting.join()
    return [receiver, lane, *sender]


def ends(pid: int) -> bool:
    """Whether a child ends by itself within the deadline; it is killed otherwise."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status == 0
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 warns of forks beside threads: the point here
def test_a_forked_process_forgets_lanes_without_waiting_for_threads_it_lacks() -> None:
    gc.disable()
    try:
        ring: list[Any] = open_lane()
        receiver, lane, sender = ring
        ring.append(ring)  # only the collector can free it
        del ring, receiver, lane, sender
        pid = os.fork()
        if pid == 0:
            gc.collect()
            os._exit(0)
        assert ends(pid)
    finally:
        gc.enable()
        gc.collect()
