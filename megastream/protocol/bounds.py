"""What numbers may be: settings where they are made, and the terms of an attachment where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

MOST_S = 1e7
"""No deadline is longer, in seconds: about 116 days."""
MOST_PIECE_BYTES = 1 << 30
"""No piece is larger, in bytes: its checksum, its scratch memory and one deadline are for the whole of it."""
MOST_COUNT = 1 << 20
"""Ranks, experts, slots, staging sets."""
MOST_NUMBER = 1 << 53
"""Incarnations and versions: every reader of JSON and the control plane's scripts hold these exactly."""


def check_settings(settings: Any, what: str, most: Mapping[str, float] | None = None) -> None:
    """ValueError names the first bool, int or float field of a dataclass that is none, not above 0, or too large.

    The limit is that of `most`, else MOST_S for a name that ends in _s, else MOST_COUNT.
    """
    for field in fields(settings):
        value, name = getattr(settings, field.name), f"{what} {field.name}"
        if field.type == "bool" and type(value) is not bool:
            raise ValueError(f"{name} must be true or false, got {value!r}")
        if field.type not in ("int", "float"):
            continue
        if type(value) not in ((int,) if field.type == "int" else (int, float)):
            raise ValueError(f"{name} must be a number ({field.type}), got {value!r}")
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be above 0 and finite, got {value}")
        limit = (most or {}).get(field.name, MOST_S if field.name.endswith("_s") else MOST_COUNT)
        if value > limit:
            raise ValueError(f"{name} must be at most {limit:.12g}, got {value}")
