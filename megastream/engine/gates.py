"""The gate of one engine: which sealed units become live before their version, and how another gate is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megastream.engine.bond import Bond
from megastream.engine.contract import CorePort
from megastream.engine.settings import EngineSettings
from megastream.protocol.mix import Gate, check_gate
from megastream.protocol.part_records import GateSet, SetGate
from megastream.protocol.records import Record
from megastream.protocol.staging import Key

logger = logging.getLogger(__name__)

Locked = Callable[[Callable[[], None]], None]
"""Runs something under the coordinator's lock: replies of the core come in its threads."""
Replies = tuple[dict[str, Any], ...]


class Gates:
    """One per coordinator, under whose lock every method is called. `advance`: more units may become live early now."""

    def __init__(
        self,
        engine: str,
        core: CorePort,
        settings: EngineSettings,
        gate: Gate,
        *,
        post: Callable[[Record], None],
        locked: Locked,
        advance: Callable[[], None],
    ) -> None:
        self._engine, self._core, self._settings = engine, core, settings
        self._post, self._locked, self._advance = post, locked, advance
        self.gate: Gate = gate
        self._requests: list[SetGate] = []
        """The first one is with the ranks."""
        self._cold: dict[str, float] = {}
        """Expert units that were hardly used lately -> how much they were, the most that a rank has seen."""
        self._cold_at: tuple[str, int] | None = None
        """(attachment, version) for which the ranks were asked how much their experts are used."""

    def part(self, bond: Bond, key: Key, units: frozenset[str]) -> tuple[str, ...]:
        """Those of `units` that become live now; none when all of them wait for the rest of their version."""
        assert bond.table is not None
        if self.gate == "version":
            return ()
        part = self._stage(bond, units) if self.gate == "stage" else self._idle(bond, key, units)
        return part if part and bond.table.is_part(key, part) else ()

    def choose(self, record: SetGate) -> None:
        """Asks all ranks for another gate, behind earlier requests, and answers the record once they replied."""
        self._requests.append(record)
        if len(self._requests) == 1:
            self._ask_gate()

    def _ask_gate(self) -> None:
        try:
            gate = check_gate(self._requests[0].gate)
        except ValueError as error:
            self._answer(str(error))
            return

        def answered(replies: Replies) -> None:
            errors = _errors(replies)
            if not errors:
                self.gate = gate
            if errors and gate != self.gate:  # some ranks have it: back, so that all cut alike
                self._call("gate", {"gate": self.gate}, lambda replies: self._answer(errors))
            else:
                self._answer(errors)

        self._call("gate", {"gate": gate}, answered)

    def _answer(self, error: str) -> None:
        request = self._requests.pop(0).request
        self._post(GateSet(engine=self._engine, request=request, gate=self.gate, error=error))
        if self._requests:
            self._ask_gate()

    def _stage(self, bond: Bond, units: frozenset[str]) -> tuple[str, ...]:
        """The first trainer stage of which all units can become live."""
        assert bond.table is not None
        stages: dict[str, list[str]] = {}
        for unit in bond.table.holders:
            stages.setdefault(unit.partition(".")[0], []).append(unit)
        return next((tuple(stage) for stage in stages.values() if units.issuperset(stage)), ())

    def _idle(self, bond: Bond, key: Key, units: frozenset[str]) -> tuple[str, ...]:
        """The coldest of the expert units that were hardly used lately; none before the ranks have said so."""
        if self._cold_at != (bond.name, key.version):
            self._cold_at, self._cold = (bond.name, key.version), {}
            self._ask_use(bond)
            return ()
        idle = [unit for unit in units if unit in self._cold]
        return tuple(sorted(idle, key=lambda unit: (self._cold[unit], unit))[: self._settings.early_units])

    def _ask_use(self, bond: Bond) -> None:
        asked = self._cold_at

        def answered(replies: Replies) -> None:
            if errors := _errors(replies):
                logger.warning("no unit is committed early, because use of experts is not known: %s", errors)
            if errors or self._cold_at != asked:
                return
            uses: dict[str, float] = {}
            for unit, use in (pair for reply in replies for pair in reply["use"].items()):
                uses[unit] = max(use, uses.get(unit, 0))
            self._cold = {unit: use for unit, use in uses.items() if use < self._settings.idle_uses}
            self._advance()

        self._call("expert_use", {"attachment": bond.name}, answered)

    def _call(self, op: str, payload: dict[str, Any], answered: Callable[[Replies], None]) -> None:
        self._core.call_ranks(op, payload, lambda replies: self._locked(lambda: answered(replies)))


def _errors(replies: Replies) -> str:
    return "; ".join(reply["error"] for reply in replies if reply["error"])
