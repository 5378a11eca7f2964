"""What a lane leaves behind when it is closed."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from tests.contract.lanes import SLOT, WITH_MARKS, connect, receive, receiver, send_sizes, start_sender
from tests.helpers.spine import eventually


def threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def cycle(transport: str) -> None:
    """One lane, opened and closed. Over gloo both ends are in this process; GPU lanes want two."""
    end = receiver(transport)
    end.address(4)  # nobody ever comes there
    address = end.address(3)
    if transport == "gloo":
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(connect(transport, address)))
        thread.start()
        lane = end.accept(address, 10.0)
        thread.join(10)
        made[0].close()
        assert lane.receive_header(5.0) is None
    else:
        sender = start_sender(transport, address, send_sizes, [SLOT])
        lane = end.accept(address, 20.0)
        receive(lane)
        assert lane.receive_header(5.0) is None
        sender.result()
        sender.end()
    lane.close()
    end.close()


@pytest.mark.parametrize("transport", WITH_MARKS)
def test_fifty_lanes_leave_no_thread_and_no_file(transport: str) -> None:
    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL's sockets, used only because both ends share the GPU, keep a file of each communicator")
    cycle(transport)
    before = threads_and_files()
    for _ in range(50 if transport == "gloo" else 8):  # on a GPU each takes a process
        cycle(transport)
    # A group closes its connections in a thread of its own.
    eventually(lambda: threads_and_files() <= before, 5.0)
