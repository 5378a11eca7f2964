"""The messages of a GPU lane: waits, over sockets of this process."""

from __future__ import annotations

import threading
import time

from megastream.protocol.bounds import MOST_S
from megastream.transport import wire


def test_the_longest_deadline_is_one_that_every_wait_takes() -> None:
    """The kernel's own waits end at 24 days; settings may say 115."""
    until, token = time.monotonic() + MOST_S, b"t" * wire.TOKEN_BYTES
    listening = wire.listen("127.0.0.1")
    accepted: list[wire.Wire] = []
    thread = threading.Thread(target=lambda: accepted.append(wire.accept(listening, token, until)), daemon=True)
    thread.start()
    dialled = wire.dial("127.0.0.1", listening.getsockname()[1], token, until)
    thread.join(10)
    threading.Timer(0.1, dialled.send, (b"late", until)).start()
    assert accepted[0].receive(4, until) == b"late"
    for each in (*accepted, dialled, listening):
        each.close()
