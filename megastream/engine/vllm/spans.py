"""Which version made which of a request's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

KEY = "weight_versions"


class SpanBook:
    """Open spans of all running requests.

    When a request ends, its spans leave with its last output under `kv_transfer_params`, the one field that vLLM 0.26
    to 0.32 carry to every route (completions, chat, generate): `{"weight_versions": [{"version", "start", "end"}]}`,
    in the form of vLLM 0.32's own CompletionOutput.weight_versions.
    """

    def __init__(self) -> None:
        self._spans: dict[str, list[dict[str, Any]]] = {}

    def add(self, label: str, outputs: dict[int, Any]) -> dict[str, int]:
        """Books one step's outputs (per client) under `label`; returns the new tokens of each request."""
        counts: dict[str, int] = {}
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                count = len(output.new_token_ids)
                spans = self._spans.setdefault(output.request_id, [])
                if count:
                    counts[output.request_id] = count
                    _extend(spans, label, count)
                if output.finish_reason is not None:
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), KEY: spans}
                    del self._spans[output.request_id]
        return counts

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops requests that ended without an output of their own (aborted)."""
        for request_id in request_ids:
            self._spans.pop(request_id, None)


def _extend(spans: list[dict[str, Any]], label: str, count: int) -> None:
    if spans and spans[-1]["version"] == label:
        spans[-1]["end"] += count
        return
    start = spans[-1]["end"] if spans else 0
    spans.append({"version": label, "start": start, "end": start + count})
