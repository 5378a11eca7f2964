"""Changed copies of plain data, whichever of the two kinds it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec


def replace(item: Any, **changes: Any) -> Any:
    """`dataclasses.replace`, for msgspec's structs too."""
    return (msgspec.structs if isinstance(item, msgspec.Struct) else dataclasses).replace(item, **changes)
