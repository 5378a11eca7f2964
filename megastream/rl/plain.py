"""A YAML file as plain data, read strictly: what would be lost or cannot be read is refused in one line."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml


def read_plain(path: Path) -> Any:
    """What the file holds. ValueError in one line, without the file's name, when it cannot be read.

    Unlike plain YAML a key that stands twice in one mapping is refused: the last one would silently win.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except RecursionError as error:
        raise ValueError("is nested too deeply for a configuration") from error
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"cannot be read: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader that refuses a key that is there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (name := (key.tag, key.value)) in lines:
                raise ValueError(f"key {key.value} is given twice, in lines {lines[name]} and {line}; keep one of them")
            lines[name] = line
        return super().construct_mapping(node, deep=deep)
