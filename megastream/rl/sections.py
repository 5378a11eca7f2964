"""A YAML file of sections, read into typed ones: what is unknown or impossible is refused by its dotted path."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from megastream.rl.plain import read_plain

T = TypeVar("T", bound="Section")

_UNKNOWN_CHOICE = re.compile(r"Invalid enum value (?P<value>.*) - at `(?P<path>.*)`")


class ConfigError(ValueError):
    """The file cannot be used. Names the dotted path and the remedy."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mapping of the file."""


def check_positive(section: Section, zero_is_fine: set[str], prefix: str = "") -> None:
    """ConfigError names a number that is not above 0; those in `zero_is_fine` (dotted names) may be 0."""
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, Section):
            check_positive(value, zero_is_fine, f"{prefix}{name}.")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            continue
        elif not math.isfinite(value):
            raise ConfigError(f"{prefix}{name} is {value}; it must be finite")
        elif value < 0 or (value == 0 and prefix + name not in zero_is_fine):
            raise ConfigError(f"{prefix}{name} is {value}; it must be above 0")


def read_mapping(path: Path) -> dict[str, Any]:
    """The file as plain data. ConfigError when it cannot be read or is something else than sections."""
    try:
        raw = read_plain(path)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: is not a mapping of sections")
    return raw


def typed(raw: dict[str, Any], root: type[T]) -> T:
    """Plain data as the sections of `root`.

    ConfigError with the path of an unknown key (and the nearest known one), of a wrong type, or of an unknown choice
    (and the known ones).
    """
    _refuse_unknown(raw, root, "", root)
    try:
        return msgspec.convert(raw, root)
    except msgspec.ValidationError as error:
        said = str(error).replace("`$.", "`")
        if (found := _UNKNOWN_CHOICE.fullmatch(said)) and (choices := _choices(found["path"], root)):
            said = f"{found['path']} is {found['value']}; it is one of {', '.join(map(str, choices))}"
        raise ConfigError(said) from error


def _choices(path: str, root: type) -> tuple[Any, ...]:
    """What may stand at a dotted path, if that is a choice."""
    section, hint = root, None
    for name in re.sub(r"\[[^]]*\]", "", path).split("."):
        hint = get_type_hints(section).get(name)
        section = _plain(hint)
    return _literals(hint)


def _literals(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for part in get_args(hint) for value in _literals(part))


def _refuse_unknown(raw: dict[str, Any], section: type, prefix: str, root: type) -> None:
    hints = get_type_hints(section)
    for key, value in raw.items():
        if key not in hints:
            raise ConfigError(f"unknown key {prefix}{key}; {_nearest(str(key), section, prefix, root)}")
        if isinstance(value, dict) and issubclass(_plain(hints[key]), Section):
            _refuse_unknown(value, _plain(hints[key]), f"{prefix}{key}.", root)


def _plain(hint: Any) -> type:
    """The class behind a hint, also of an optional section; `object` when it is not a class."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if isinstance(hint, UnionType) else [hint]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and get_origin(kinds[0]) is None else object


def _nearest(key: str, section: type, prefix: str, root: type) -> str:
    """Looks in the same section first, then in the whole file: a key is often right and its place wrong."""
    near = difflib.get_close_matches(key, list(get_type_hints(section)), n=1)
    if near:
        return f"the nearest known key is {prefix}{near[0]}"
    everywhere = {name.rsplit(".", 1)[-1]: name for name in _all_keys(root, "")}
    near = difflib.get_close_matches(key, list(everywhere), n=1)
    if near:
        return f"the nearest known key is {everywhere[near[0]]}"
    return f"known here: {', '.join(prefix + name for name in get_type_hints(section))}"


def _all_keys(section: type, prefix: str) -> list[str]:
    keys = []
    for name, hint in get_type_hints(section).items():
        keys.append(prefix + name)
        if issubclass(_plain(hint), Section):
            keys += _all_keys(_plain(hint), f"{prefix}{name}.")
    return keys
