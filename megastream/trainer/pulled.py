"""The pieces that an engine pulls: packed when they are final, sent when its commit asks for them."""

from __future__ import annotations

from megastream.trainer.emit import Emitter


class PullEmitter(Emitter):
    """An emitter whose pieces wait in their slots, and behind these in their buckets, until `let_go`.

    It uses the lanes of another one, which has nothing on its way by then: what that one emits is acknowledged before
    an engine can commit.
    """

    def begin(self, version: int, attempt: int) -> None:
        super().begin(version, attempt)
        self._slots.may_leave.clear()

    def let_go(self) -> None:
        """The engine takes the open version now. Any thread."""
        self._slots.may_leave.set()

    def _close_lanes(self) -> None:
        """They are the other one's."""
