"""What the processes of one run tell each other: the job file, the passes, and the notes they leave for one another."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megastream.protocol.control import ControlLog
from megastream.rl.config import Config


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the launcher, read by every process of the run. Paths are absolute."""

    run_id: str
    engine: str
    control_url: str
    run_folder: str
    temp_folder: str
    config: Config

    @property
    def results(self) -> Path:
        return Path(self.run_folder)

    @property
    def temp(self) -> Path:
        return Path(self.temp_folder)

    @property
    def checkpoint(self) -> Path:
        return self.results / "checkpoint"

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    @staticmethod
    def read(path: Path) -> Job:
        return msgspec.json.decode(path.read_bytes(), type=Job)


@dataclass(frozen=True, slots=True)
class Pass:
    """One training from the same checkpoint with the same data. `mode` is stock, stream or whole."""

    name: str
    mode: str
    updates: int
    checked: bool


def passes_of(config: Config) -> list[Pass]:
    """In the order in which they run. The stock pass trains while the engine generates, without any update."""
    passes = []
    for mode in config.run.modes:
        passes.append(Pass(mode, mode, config.run.updates, checked=False))
        if mode != "stock" and config.run.checked_updates:
            passes.append(Pass(f"{mode}-checked", mode, config.run.checked_updates, checked=True))
    return passes


class Notes:
    """Small facts that one process leaves under a name and another waits for. They live in the control plane."""

    def __init__(self, log: ControlLog) -> None:
        self._log = log

    def leave(self, name: str, **facts: Any) -> None:
        self._log.put_blob(f"note/{name}", msgspec.json.encode(facts))

    def look(self, name: str) -> dict[str, Any] | None:
        """The facts, or None when nobody left them yet."""
        raw = self._log.get_blob(f"note/{name}")
        return None if raw is None else msgspec.json.decode(raw)

    def wait(self, name: str, deadline_s: float, missing: str) -> dict[str, Any]:
        """Blocks until the note is there. TimeoutError says for how long, and what was `missing`."""
        end = time.monotonic() + deadline_s
        while (facts := self.look(name)) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"waited {deadline_s:g} s for {missing}")
            time.sleep(0.02)
        return facts


class LineLog:
    """A file of JSON objects, one a line, written as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

    def write(self, **line: Any) -> None:
        """OSError that names the file, when its disk is full for example."""
        raw = msgspec.json.encode(line) + b"\n"
        try:
            while raw:
                raw = raw[self._file.write(raw) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a LineLog; an absent file has none."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
