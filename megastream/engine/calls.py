"""What an engine rank answers in the core's ordered calls, on its worker's thread: plain data in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megastream.engine.attachment import Attachment
from megastream.engine.compare import Comparison
from megastream.engine.contract import ENGINE_ERRORS, LiveModel
from megastream.engine.settings import EngineSettings
from megastream.engine.stream import StreamSink
from megastream.plan.unit import experts_of
from megastream.protocol.mix import Gate, check_gate
from megastream.protocol.records import Compared, Record
from megastream.protocol.staging import Key
from megastream.protocol.terms import ProtocolError


class RankCalls:
    """The calls of one rank agent. `current` gives its attachment; `choose` sets the gate, or raises ProtocolError."""

    def __init__(
        self,
        rank: int,
        live: LiveModel,
        settings: EngineSettings,
        post: Callable[[Record], None],
        current: Callable[[], Attachment | None],
        choose: Callable[[Gate], None],
    ) -> None:
        self._rank, self._live, self._settings = rank, live, settings
        self._post, self._current, self._choose = post, current, choose
        self._compared: tuple[str, Key] | None = None
        """The comparison that was done last, and said."""

    def answer(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Never raises. `error` says what went wrong, and then `done` is True.

        `compare` {attachment, incarnation, version, attempt, pulls} -> {done, error}: one slice of the comparison.
        `compare_pulled` {attachment, incarnation, version, attempt} -> {done, error}: behind it, when it `pulls`: what
        is not staged, all of it at once.
        `gate` {gate} -> {done, error}: versions that arrive from here on are cut for it.
        `drop` {attachment, version, attempt} -> {done, error}: no commit of it follows, and its staging is free again.
        `expert_use` {attachment} -> {done, error, use}: how often each expert unit was routed to lately.
        """
        calls: dict[str, Callable[..., dict[str, Any]]]
        calls = {"compare": self._compare, "compare_pulled": self._compare_pulled, "drop": self._drop}
        calls |= {"gate": self._set_gate, "expert_use": self._expert_use}
        if op not in calls:
            return {"done": True, "error": f"engine rank {self._rank} knows no call {op!r}"}
        try:
            return {"done": True, "error": "", **calls[op](**payload)}
        except ENGINE_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            return {"done": True, "error": f"engine rank {self._rank} could not answer {op}: {reason}"}

    def _compare(
        self, attachment: str, incarnation: int, version: int, attempt: int, pulls: bool = False
    ) -> dict[str, Any]:
        asked = attachment, Key(incarnation, version, attempt)
        if asked == self._compared:  # all ranks are asked until the last one is done; its staging may have gone by now
            return {"done": True}
        comparison = self._sink(attachment).compare(asked[1])
        done = comparison.step(self._settings.compare_slice_s)
        if done:
            self._compared = asked
        if done and not pulls:
            self._say_compared(attachment, comparison)
        return {"done": done}

    def _compare_pulled(self, attachment: str, incarnation: int, version: int, attempt: int) -> dict[str, Any]:
        sink, key = self._sink(attachment), Key(incarnation, version, attempt)
        comparison = sink.compare(key)
        sink.compare_pulled(key, comparison)
        self._say_compared(attachment, comparison)
        return {}

    def _say_compared(self, attachment: str, comparison: Comparison) -> None:
        self._post(
            Compared(
                attachment=attachment,
                rank=self._rank,
                tensors=comparison.tensors,
                differing=comparison.differing,
                first=comparison.first,
            )
        )

    def _set_gate(self, gate: str) -> dict[str, Any]:
        chosen = check_gate(gate)
        if chosen == "idle_experts":
            self._live.expert_use()
        self._choose(chosen)
        return {}

    def _drop(self, attachment: str, version: int, attempt: int) -> dict[str, Any]:
        self._sink(attachment).withdrawn(version, attempt)
        return {}

    def _expert_use(self, attachment: str) -> dict[str, Any]:
        counts, use = self._live.expert_use(), {}
        for unit in self._sink(attachment).units:
            layer_and_experts = experts_of(unit)
            if layer_and_experts is not None:
                layer, experts = layer_and_experts
                use[unit] = sum(counts[layer][expert] for expert in experts)
        return {"use": use}

    def _sink(self, attachment: str) -> StreamSink:
        current = self._current()
        if current is None or current.terms.attachment != attachment or not isinstance(current.sink, StreamSink):
            raise ProtocolError(f"attachment {attachment} is not bound here with kind stream")
        return current.sink
