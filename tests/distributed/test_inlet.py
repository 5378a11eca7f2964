"""Lanes of an attachment that ends while they open: nothing waits on, and the next attachment's addresses stay."""

from __future__ import annotations

import threading
import time
from typing import Any

from megastream.engine.inlet import Inlet
from megastream.engine.settings import EngineSettings
from megastream.transport.gloo import GlooReceiver, connect
from tests.helpers.plans import small_plan

PLAN = small_plan()


def inlet(receiver: GlooReceiver, failures: list[str]) -> Inlet:
    sink: Any = None  # no piece comes
    return Inlet(receiver, PLAN, 0, sink, EngineSettings(bind_s=30, liveness_s=5), failures.append)


def test_an_abort_ends_lanes_that_nobody_has_connected_to() -> None:
    receiver, failures = GlooReceiver("127.0.0.1"), []
    before = threading.active_count()
    broken = inlet(receiver, failures)
    broken.addresses()
    broken.open()
    time.sleep(0.2)
    started = time.monotonic()
    broken.abort()
    broken.join(10.0)
    assert time.monotonic() - started < 10.0, "far below bind_s"
    after = inlet(receiver, failures)
    addresses = after.addresses()
    after.open()
    lanes = [connect(address, 5.0) for address in addresses.values()]
    for lane in lanes:
        lane.close()
    after.join(20.0)
    assert threading.active_count() == before and failures == []
    receiver.close()
