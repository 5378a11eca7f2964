"""One line per version, put together from the records of the control plane as they come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megastream.protocol.records import (
    Accepted,
    Attach,
    Attached,
    Committed,
    Emitted,
    Loaded,
    Record,
    WeightsReady,
)
from megastream.rl.job import Pass


@dataclass
class VersionLine:
    """What is known of one version of one pass; what nobody measured is None. A base has no train step."""

    name: str
    attachment: str
    version: int
    train_step: int = 0
    attempt: int = 0
    units: int = 0
    elements: int = 0
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Attempt -> payload and wire bytes of all trainer ranks."""
    stall_ms: float | None = None
    load_ms: float | None = None
    repair_ms: float | None = None
    visible_unix_s: float | None = None

    @property
    def payload_bytes(self) -> int:
        return self.sent.get(self.attempt, (0, 0))[0]

    @property
    def wire_bytes(self) -> int:
        return self.sent.get(self.attempt, (0, 0))[1]

    @property
    def wasted_bytes(self) -> int:
        """Wire bytes of attempts that did not count."""
        return sum(wire for attempt, (_, wire) in self.sent.items() if attempt != self.attempt)

    def as_json(self) -> dict[str, Any]:
        """The line of the JSON log."""
        return {
            "pass": self.name,
            "version": self.version,
            "train_step": self.train_step,
            "units": self.units,
            "elements": self.elements,
            "payload_bytes": self.payload_bytes,
            "wire_bytes": self.wire_bytes,
            "wasted_bytes": self.wasted_bytes,
            "stall_ms": self.stall_ms,
            "load_ms": self.load_ms,
            "repair_ms": self.repair_ms,
            "visible_unix_s": self.visible_unix_s,
        }


@dataclass
class Ledger:
    """Takes every record of a run once, in order. `passes` are those with an engine, in the order of the run."""

    passes: list[Pass]
    attached: dict[str, Attached] = field(default_factory=dict)
    lines: dict[tuple[str, int], VersionLine] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def take(self, record: Record) -> VersionLine | None:
        """The version's line once it is both live and complete: the manifest may come before or after the commit."""
        match record:
            case Attach():
                self._names[record.attachment] = self.passes[len(self._names)].name
            case Attached():
                self.attached[record.attachment] = record
            case Emitted():
                self._take_emitted(record)
            case Accepted():
                line = self._line(record.attachment, record.version)
                line.train_step, line.attempt = record.train_step, record.attempt
            case WeightsReady():
                line = self._line(record.attachment, record.version)
                line.units, line.elements = len(record.units), record.elements
                return line if line.visible_unix_s is not None else None
            case Loaded():
                line = self._line(record.attachment, record.version)
                line.load_ms = max(line.load_ms or 0.0, 1e3 * record.load_s)
                line.repair_ms = max(line.repair_ms or 0.0, 1e3 * record.repair_s)
            case Committed():
                line = self._line(record.attachment, record.version)
                line.stall_ms = _stall_ms(record)
                line.visible_unix_s = record.visible_unix_s
                return line if line.units else None
        return None

    def of_pass(self, name: str) -> list[VersionLine]:
        """The pass's versions in order, without its base."""
        lines = [line for line in self.lines.values() if line.name == name and line.train_step > 0]
        return sorted(lines, key=lambda line: line.version)

    def base_of(self, name: str) -> int:
        """The base version of a pass. KeyError when it never attached."""
        attachment = {name: attachment for attachment, name in self._names.items()}[name]
        return self.attached[attachment].version

    def _take_emitted(self, record: Emitted) -> None:
        line = self._line(record.attachment, record.version)
        payload, wire = line.sent.get(record.attempt, (0, 0))
        line.sent[record.attempt] = payload + record.payload_bytes, wire + record.wire_bytes

    def _line(self, attachment: str, version: int) -> VersionLine:
        key = (attachment, version)
        if key not in self.lines:
            self.lines[key] = VersionLine(self._names[attachment], attachment, version)
        return self.lines[key]


def _stall_ms(record: Committed) -> float | None:
    """A paused update's own stall, else that of the slowest rank's commit."""
    if record.stall_s is not None:
        return 1e3 * record.stall_s
    return 1e3 * max(rank.stall_s for rank in record.ranks) if record.ranks else None
