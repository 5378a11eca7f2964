"""What live weights hold while a version becomes live in parts: two versions, and which units are at the newer one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Gate = Literal["version", "stage", "idle_experts"]
"""Which sealed units of a version become live when.

`version`: all of them at once, when the version is complete. `stage`: those of a trainer's pipeline stage as soon as
every engine rank that holds any of them has sealed them and the version is accepted; the last stage with the version.
`idle_experts`: units of experts that recent batches were not routed to, the coldest first; the rest with the version.
"""

GATES: tuple[Gate, ...] = ("version", "stage", "idle_experts")

_MIX = re.compile(r"([0-9]+)\.\.([0-9]+)\+[0-9]+")


def check_gate(gate: str) -> Gate:
    """ValueError names an unknown gate and the known ones."""
    for known in GATES:
        if gate == known:
            return known
    if gate == "pause":
        raise ValueError(
            "gate pause is chosen by the trainer, attachment by attachment: attach with kind whole; megastream.gate "
            f"takes {', '.join(GATES)}"
        )
    raise ValueError(f"megastream.gate is {gate!r}; choose one of {', '.join(GATES)}")


@dataclass(frozen=True, slots=True)
class Mix:
    """Units `ahead` are live at version `newest`, units `behind` at `oldest`; neither is empty."""

    oldest: int
    newest: int
    ahead: tuple[str, ...]
    """In the order in which they were committed."""
    behind: tuple[str, ...]

    @property
    def label(self) -> str:
        """`6..7+3`: 3 units are ahead. No two mixes of a run have the same label: `ahead` only grows, and a version is
        never used twice."""
        return f"{self.oldest}..{self.newest}+{len(self.ahead)}"

    def vector(self) -> dict[str, int]:
        """The version of every unit."""
        return {**dict.fromkeys(self.ahead, self.newest), **dict.fromkeys(self.behind, self.oldest)}


def mixed_versions(label: str) -> tuple[int, int] | None:
    """(oldest, newest) of a mix's label; None for any other label, `7` for example, which is one version."""
    found = _MIX.fullmatch(label)
    return None if found is None else (int(found[1]), int(found[2]))
