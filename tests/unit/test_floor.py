"""The floor counts what the engine's ranks compute with; a rank that cannot tell is an error, not fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest

from megastream.rl.floor import engine_floor


def parameter(name: str, elements: int, padding: int = 0, used: bool = True) -> dict[str, Any]:
    return {"name": name, "elements": elements, "item_bytes": 2, "padding": padding, "used": used}


def replies() -> list[dict[str, Any]]:
    first = [parameter("embed", 640, padding=40), parameter("head", 640, padding=40, used=False)]
    second = [parameter("norm", 10), parameter("head", 640, padding=40)]
    return [{"ok": True, "rank": rank, "error": "", "parameters": own} for rank, own in enumerate((first, second))]


def test_padding_and_unused_copies_are_listed_and_not_counted() -> None:
    floor = engine_floor(replies(), 2)
    assert floor.num_bytes == 2 * (600 + 10 + 600)
    assert floor.num_tensors == 3
    assert floor.unused == ("rank 0: head",)
    assert floor.padding == {"rank 0: embed": 40, "rank 1: head": 40}


def test_a_rank_that_is_missing_or_cannot_tell_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"ranks \[0\] told"):
        engine_floor(replies()[:1], 2)
    broken = [replies()[0], {"ok": False, "rank": 1, "error": "no live model"}]
    with pytest.raises(ValueError, match="engine rank 1 .* no live model"):
        engine_floor(broken, 2)
