"""Does speculation pay? It does while most steps need no clipping."""

from __future__ import annotations

import logging
from collections import deque

from megastream.trainer.policies import WINDOW_STEPS

logger = logging.getLogger(__name__)


class AbortRate:
    """Watches which steps had to be clipped, and says whether the next one is speculated on.

    More than `max_rate` of the last 16 steps clipped: `speculating` ends and steps are made as with `pipelined`. It
    begins again when at most half of that rate is left. The norm is the same on all ranks, hence so is the answer;
    the rank that gets `speaks` logs each change. ValueError for a rate outside [0, 1].
    """

    def __init__(self, max_rate: float, *, speaks: bool = False) -> None:
        if not 0.0 <= max_rate <= 1.0:
            raise ValueError(f"max_abort_rate={max_rate} is no share of steps; give a number from 0 to 1")
        self._max_rate, self._speaks = max_rate, speaks
        self._clipped: deque[bool] = deque(maxlen=WINDOW_STEPS)
        self.speculating = True

    def note(self, clipped: bool) -> None:
        """One more step that counts; `clipped`: its norm was above the clipping norm."""
        self._clipped.append(clipped)
        aborts, most = sum(self._clipped), self._max_rate * WINDOW_STEPS
        before = self.speculating
        if before and aborts > most:
            self.speculating = False
        elif not before and aborts <= most / 2:
            self.speculating = True
        if self.speculating != before and self._speaks:
            logger.warning(
                "%d of the last %d steps were clipped (max_abort_rate %g): speculative steps %s",
                aborts,
                len(self._clipped),
                self._max_rate,
                "begin again" if self.speculating else "become pipelined ones until the rate has halved",
            )
