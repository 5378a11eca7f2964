"""The version of every unit under a token's label, from the records of the log: for hosts that cannot ask the core."""

from __future__ import annotations

from collections.abc import Iterable

from megastream.protocol.mix import Mix, mixed_versions
from megastream.protocol.part_records import PartCommitted
from megastream.protocol.records import Attach, Bound, Record


def versions_of(records: Iterable[Record], engine: str, label: str) -> dict[str, int]:
    """Unit -> version while `engine` stamped tokens with `label`, a mix like `6..7+3`; empty when it never did."""
    between = mixed_versions(label)
    if between is None:
        return {}
    attachments: set[str] = set()
    units: dict[str, dict[str, None]] = {}
    ahead: dict[tuple[str, int], tuple[str, ...]] = {}
    for record in records:
        match record:
            case Attach() if record.engine == engine:
                attachments.add(record.attachment)
            case Bound() if record.attachment in attachments:
                units.setdefault(record.attachment, {}).update(dict.fromkeys(record.units))
            case PartCommitted() if record.attachment in attachments:
                version = (record.attachment, record.version)
                ahead[version] = ahead.get(version, ()) + record.units
                if record.label == label:
                    behind = tuple(unit for unit in units[record.attachment] if unit not in ahead[version])
                    return Mix(*between, ahead[version], behind).vector()
    return {}
