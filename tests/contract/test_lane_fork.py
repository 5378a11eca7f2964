"""A process forked while lanes are open lacks gloo's threads; it must be able to forget the lanes all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gc, os
from threading import Thread
from megastream.transport.gloo import GlooReceiver, connect

receiver, sender = GlooReceiver("127.0.0.1"), []
address = receiver.address(0)
connecting = Thread(target=lambda: sender.append(connect(address, 30)))
connecting.start()
lane = receiver.accept(address, 30)
connecting.join()
gc.disable()
ring = [receiver, lane, sender]
ring.append(ring)  # only the collector can free it
del ring, receiver, lane, sender
child = os.fork()
if child == 0:
    gc.collect()
    os._exit(0)
print("child", os.waitpid(child, 0)[1], flush=True)
gc.collect()
"""


def test_a_forked_process_forgets_lanes_without_waiting_for_threads_it_lacks() -> None:
    """In a process of its own: this one has threads of other tests."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    ) as program:
        try:
            said, _ = program.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)  # the child waits for ever, and the program for it
            raise
    assert said == "child 0\n"
    assert program.returncode == 0
