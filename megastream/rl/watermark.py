"""The highest version that a run can have published, kept on the disk: it outlives the control plane.

Versions are never reused. The control log knows the highest one as long as its server keeps its data; this file holds
an upper bound of it for the day when trainer and server are both gone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import msgspec

from megastream.protocol.bounds import MOST_NUMBER
from megastream.protocol.control import ControlLog
from megastream.trainer.checkpoint_folder import write_synced

BLOCK = 32
"""Versions that are reserved at a time: one write in so many steps; at most so many numbers are skipped at a start."""


class _Reserved(msgspec.Struct):
    reserved: Annotated[int, msgspec.Meta(ge=-1, le=MOST_NUMBER)]


class Watermark:
    """For trainer rank 0. ValueError names a file that cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self.reserved = msgspec.json.decode(path.read_bytes(), type=_Reserved).reserved
        except FileNotFoundError:
            self.reserved = -1
        except (UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise ValueError(f"{path} does not say which versions were reserved ({error}); restore it") from error

    def lift(self, log: ControlLog, resumed: int = -1) -> None:
        """Tells a control log that may have lost its data what was published. Before the attachment.

        `resumed` is the version that a checkpoint was saved at: all that is left when this file is gone, too.
        """
        if (known := max(self.reserved, resumed)) > log.highest_version():
            log.raise_version(known)

    def reserve(self, version: int) -> None:
        """On the disk when it returns; call it before anybody can see `version`."""
        if version > self.reserved:
            self.reserved = version + BLOCK - 1
            write_synced(self._path, json.dumps({"reserved": self.reserved}))
