"""Which version made which of a request's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megastream.engine.vllm.kv import KvBook
from megastream.protocol.mix import mixed_versions

KEY = "weight_versions"


class SpanBook:
    """Open spans of all running requests.

    A request's spans leave under `kv_transfer_params`, the one field that vLLM 0.26 to 0.32 carry to every route
    (completions, chat, generate): `{"weight_versions": [{"version", "start", "end"}]}`, in the form of vLLM 0.32's own
    CompletionOutput.weight_versions. They are on the output that ends the request, also when it ends with an error. A
    request with stop strings is ended by vLLM's front end, on an output of which the core cannot know that it is the
    last, so each of its outputs carries the spans so far. A request that its client aborts gets its last output
    from the front end alone: only vLLM 0.32's own field has its spans.

    While a version becomes live in parts, spans also say `oldest` and `newest` of the versions that units held.

    `kv_versions` leave beside them: which versions computed the keys and values that these tokens attended to.
    """

    def __init__(self, kv: KvBook) -> None:
        self._kv = kv
        self._spans: dict[str, list[dict[str, Any]]] = {}

    def add(self, label: str, outputs: dict[int, Any], has_stop_strings: Callable[[str], bool]) -> dict[str, int]:
        """Books one step's outputs (per client) under `label`; returns the new tokens of each request."""
        counts: dict[str, int] = {}
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                count = len(output.new_token_ids)
                spans = self._spans.setdefault(output.request_id, [])
                if count:
                    counts[output.request_id] = count
                    _extend(spans, label, count)
                if output.finish_reason is not None or has_stop_strings(output.request_id):
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), **self.carried(output.request_id)}
                if output.finish_reason is not None:
                    del self._spans[output.request_id]
        return counts

    def carried(self, request_id: str) -> dict[str, Any]:
        """The spans of a request so far, as its output carries them: a copy, outputs are encoded in another thread."""
        spans = [dict(span) for span in self._spans.get(request_id, ())]
        return {KEY: spans, **self._kv.carried(request_id, spans[-1]["end"] if spans else 0)}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops requests that ended, also without an output of their own (aborted)."""
        for request_id in request_ids:
            self._spans.pop(request_id, None)
            self._kv.forget(request_id)


def _extend(spans: list[dict[str, Any]], label: str, count: int) -> None:
    if spans and spans[-1]["version"] == label:
        spans[-1]["end"] += count
        return
    start = spans[-1]["end"] if spans else 0
    mixed = mixed_versions(label)
    between = {} if mixed is None else {"oldest": str(mixed[0]), "newest": str(mixed[1])}
    spans.append({"version": label, **between, "start": start, "end": start + count})
