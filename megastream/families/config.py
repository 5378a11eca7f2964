"""Reads single fields of a Hugging Face config.json, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping


def number(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    """A whole number. ValueError names a field that is missing (and has no default) or is something else."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"config.json field {key} is {value!r}; expected a whole number")
    return value


def flag(config: Mapping[str, object], key: str) -> bool:
    """True or false; false when the field is missing."""
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"config.json field {key} is {value!r}; expected true or false")
    return value
