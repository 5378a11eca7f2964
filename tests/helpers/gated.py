"""A real engine under a gate, with a trainer whose second stage is slow: what every token's label says is held against
what the token itself spells (tests/helpers/reveal.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megastream.protocol.mix import mixed_versions
from megastream.sync import EngineSync
from tests.helpers import reveal
from tests.helpers.engine import Answer, Engine
from tests.helpers.reveal_trainer import SlowOrders
from tests.helpers.traffic import Load, traffic, update_often

PLACES = ("s0.embed", "s0.l0.e0:2", "s1.l3.e6:8", "s1.head")
"""Units of a token's digits."""
HOT = (0, reveal.MOE.experts - 1)
LAYERS, EXPERTS = range(reveal.MOE.layers), range(reveal.MOE.experts)


def digits_said(engine: Engine, label: str) -> tuple[int, ...]:
    """The digits that a token with this label must spell."""
    versions = engine.run(engine.core("megastream_versions", label))
    units = versions["units"] or dict.fromkeys(PLACES, int(label))
    assert mixed_versions(label) in (None, (versions["oldest"], versions["newest"]))
    assert {versions["oldest"], versions["newest"]} == set(units.values())
    return tuple(units[unit] % reveal.BASE for unit in PLACES)


def count_mixes(engine: Engine, answers: list[Answer]) -> dict[str, int]:
    """Tokens; those that met two versions, by the weights and by their stamp; those whose stamp is wrong."""
    found = {"tokens": 0, "met_mix": 0, "stamped_mix": 0, "wrong": 0}
    said: dict[str, tuple[int, ...]] = {}
    for token, label in (pair for a in answers for pair in zip(a.tokens, a.labels(), strict=True)):
        if label not in said:
            said[label] = digits_said(engine, label)
        found["tokens"] += 1
        found["met_mix"] += reveal.is_mixed(token)
        found["stamped_mix"] += mixed_versions(label) is not None
        found["wrong"] += reveal.digits(token) != said[label]
    return found


class Attached:
    """The engine, its trainer, and the host that chooses the gate."""

    def __init__(self, engine: Engine, orders: SlowOrders, host: EngineSync, next_version: int) -> None:
        self.engine, self.orders, self.host, self.next_version = engine, orders, host, next_version

    def update(self, gate: str, updates: int, tokens: int, load: Load = traffic) -> list[Answer]:
        """So many updates under a gate while requests run."""

        async def run() -> list[Answer]:
            await asyncio.to_thread(self.host.set_gate, gate)
            step = partial(asyncio.to_thread, self.orders.update)
            first, self.next_version = self.next_version, self.next_version + updates
            return await update_often(self.engine, first, updates, tokens, step, load)

        return self.engine.run(run(), timeout_s=60 + updates * 5 + tokens / 20)

    def count(self, answers: list[Answer]) -> dict[str, int]:
        """See count_mixes."""
        return count_mixes(self.engine, answers)

    @contextmanager
    def lying(self) -> Iterator[None]:
        """The histogram says that the experts of every token are cold, and all others warm."""
        lie = {layer: [0.0 if expert // 2 in (0, HOT[1] // 2) else 9.0 for expert in EXPERTS] for layer in LAYERS}
        self.ask_ranks("feed_use", lie)
        try:
            yield
        finally:
            self.ask_ranks("feed_use", None)

    @contextmanager
    def broken(self, break_it: Callable[[bool], Any]) -> Iterator[None]:
        """While something is broken on purpose; afterwards every unit is written again."""
        break_it(True)
        try:
            yield
        finally:
            break_it(False)
            self.update("version", 1, 50)

    def ask_core(self, utility: str, *args: Any) -> Any:
        return self.engine.run(self.engine.core(utility, *args))

    def ask_ranks(self, method: str, *args: Any) -> list[Any]:
        return self.engine.run(self.engine.ranks(method, *args))
