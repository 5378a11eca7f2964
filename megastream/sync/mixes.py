"""The version of every unit under a token's label, from the records of the log: for hosts that cannot ask the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megastream.protocol.bind import EngineUnits
from megastream.protocol.mix import Mix, mixed_versions
from megastream.protocol.part_records import PartCommitted
from megastream.protocol.records import Record


def versions_of(
    records: Iterable[Record], units_of: Callable[[str], EngineUnits | None], engine: str, label: str
) -> dict[str, int]:
    """Unit -> version while `engine` stamped tokens with `label`, a mix like `6..7+3`.

    `units_of` gives the units of an attachment. Empty when the engine never did, or when records of the version's parts
    are missing.
    """
    between = mixed_versions(label)
    if between is None:
        return {}
    ahead: dict[tuple[str, int], tuple[str, ...]] = {}
    for record in records:
        if not isinstance(record, PartCommitted):
            continue
        version = (record.attachment, record.version)
        parts = ahead[version] = ahead.get(version, ()) + record.units
        bound = units_of(record.attachment) if record.label == label else None
        if bound is None or bound.engine != engine:
            continue
        mix = Mix(*between, parts, tuple(unit for unit in bound.units if unit not in parts))
        if mix.label == label:
            return mix.vector()
    return {}
