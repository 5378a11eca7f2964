"""A wait that ends, held against the limit that it promises."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

SLACK_S = 20.0
"""How late a busy machine may be. All other limits in such a test are far above the one under test plus this."""
FAR_S = 600.0


@contextmanager
def ends_at(limit_s: float, early_s: float = 0.05) -> Iterator[None]:
    """The block takes `limit_s`: what it waits for does not come, and nobody waits longer than was promised, or gives
    up sooner (but for `early_s`, which may have passed before the block)."""
    begin = time.monotonic()
    yield
    spent_s = time.monotonic() - begin
    assert limit_s - early_s <= spent_s <= limit_s + SLACK_S, f"promised {limit_s:g} s, took {spent_s:.2f} s"
