"""What a run's log says of its engines: who is up, which version is live, who is attached. Nothing but records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megastream.protocol.part_records import PartCommitted
from megastream.protocol.records import (
    Attach,
    Attached,
    Committed,
    Detached,
    EngineReady,
    Failed,
    Poisoned,
    Record,
)


@dataclass
class EngineState:
    """One engine start. What the log has forgotten is not known here either."""

    name: str
    world_size: int
    ranks: set[int] = field(default_factory=set)
    """Those that have come up."""
    live: int = 0
    """The newest version that was live in every unit; a fresh engine serves version 0."""
    trouble: str = ""
    """Why its weights are not known to be of one version."""
    attachments: dict[str, int] = field(default_factory=dict)
    """Those that have not ended, and their incarnations."""

    @property
    def is_up(self) -> bool:
        return len(self.ranks) == self.world_size

    def take(self, record: Record) -> None:
        """A record of this engine, or of one of its attachments."""
        if isinstance(record, Attach | Committed | PartCommitted):
            self.attachments[record.attachment] = record.incarnation
        match record:
            case Attached() | Committed():
                self.live, self.trouble = record.version, ""
            case PartCommitted():
                self.trouble = f"serves {record.label}, units of two versions"
            case Poisoned():
                self.trouble = f"is poisoned: {record.reason}"
            case Failed() | Detached():
                self.attachments.pop(record.attachment, None)


def engines_of(records: Iterable[Record], engine_of: Callable[[str], str]) -> dict[str, EngineState]:
    """Every engine that these records speak of, by name, in the order in which they came up.

    `engine_of` gives the engine of an attachment whose Attach the log has forgotten, or "".
    """
    engines: dict[str, EngineState] = {}
    owners: dict[str, str] = {}
    for record in records:
        if isinstance(record, EngineReady):
            state = engines.setdefault(record.engine, EngineState(record.engine, record.world_size))
            state.ranks.add(record.rank)
            continue
        attachment, name = getattr(record, "attachment", ""), getattr(record, "engine", "")
        if attachment and (name or attachment not in owners):
            owners[attachment] = name or engine_of(attachment)
        name = name or owners.get(attachment, "")
        if name in engines:
            engines[name].take(record)
    return engines
