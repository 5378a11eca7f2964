"""`python -m tests.helpers.killed_trainer URL RUN BASE [pull]`: a trainer that is killed in the middle of a piece, or
of a pull.

All its ranks are threads of this one process. It makes one version live; of the next one a few pieces arrive whole, and
then the process ends by SIGKILL: with a header gone and its bytes not, or, while an engine pulls, before a header.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from megastream.trainer.pulled import PullEmitter
from megastream.transport.gloo_lane import GlooSendLane
from megastream.transport.gloo_pair import PAYLOAD_TAG, GlooPair
from tests.helpers.told import told

WHOLE_PIECES, PULLED_PIECES = 3, 16
"""Of a pull about half, so that something of it is live on each rank."""


def die_in_mid_piece() -> None:
    """From now on: after a few pieces, between a header and its payload."""
    honest, lock, left = GlooPair.post_send, threading.Lock(), [WHOLE_PIECES]

    def post_send(self: GlooPair, tensor: Any, tag: int) -> Any:
        if tag == PAYLOAD_TAG:
            with lock:
                left[0] -= 1
                if left[0] < 0:
                    time.sleep(0.3)  # the engine has the header, and waits for what it announces
                    os.kill(os.getpid(), signal.SIGKILL)
        return honest(self, tensor, tag)

    GlooPair.post_send = post_send  # type: ignore[method-assign]


def die_in_a_pull() -> None:
    """From now on: once an engine has asked for what it does not stage, after some pieces of that."""
    honest, posted, lock, left = PullEmitter.let_go, GlooSendLane.post, threading.Lock(), [PULLED_PIECES]

    def post(self: GlooSendLane, *args: Any) -> None:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                time.sleep(0.3)  # what went before is being written meanwhile
                os.kill(os.getpid(), signal.SIGKILL)
        posted(self, *args)

    def let_go(self: PullEmitter) -> None:
        GlooSendLane.post = post  # type: ignore[method-assign]
        honest(self)

    PullEmitter.let_go = let_go  # type: ignore[method-assign]


if __name__ == "__main__":
    url, run, base, *how = sys.argv[1:]
    with told(url, run, int(base)) as trainer:
        trainer.update()
        (die_in_a_pull if how else die_in_mid_piece)()
        trainer.begin_update()
        time.sleep(60)
