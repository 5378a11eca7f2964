"""A save on its way on one rank: its files are written in a thread, beside the training."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from megastream.trainer.checkpoint_folder import Manifest, measure
from megastream.trainer.compat_checkpoint import PlannedSave


@dataclass
class PendingSave:
    """Began at `begin_s` (monotonic) and held the training up for `blocked_s`, both in seconds.

    `files` (name -> bytes, checksum) and `error` are the thread's, and read once `is_written_within` says yes. There is
    an error as long as the thread has not come to its end, so that whatever ends it counts as one.
    """

    folder: Path
    manifest: Manifest
    planned: PlannedSave
    begin_s: float
    blocked_s: float
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    error: str = "the thread that writes broke off, its traceback is on stderr"
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self, name: str) -> None:
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def is_written_within(self, seconds: float) -> bool:
        """Whether the thread has ended, well or not, now or in so many seconds."""
        return self._ended.wait(seconds)

    def _run(self) -> None:
        try:
            self.planned.write()
            self.files = {path.name: measure(path) for path in self.planned.files if path.exists()}
            self.error = ""
        except (OSError, RuntimeError) as error:
            self.error = str(error)
        finally:
            self._ended.set()
