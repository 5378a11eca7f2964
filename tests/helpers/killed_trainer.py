"""`python -m tests.helpers.killed_trainer URL RUN BASE`: a trainer that is killed in the middle of a piece.

All its ranks are threads of this one process. It makes one version live; of the next one a few pieces arrive whole, and
then, with a header gone and its bytes not, the process ends by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from megastream.transport.gloo_pair import PAYLOAD_TAG, GlooPair
from tests.helpers.told import told

WHOLE_PIECES = 3


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


if __name__ == "__main__":
    with told(sys.argv[1], sys.argv[2], int(sys.argv[3])) as trainer:
        trainer.update()
        die_in_mid_piece()
        trainer.begin_update()
        time.sleep(60)
