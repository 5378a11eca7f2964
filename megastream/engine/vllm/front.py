"""The record of every answer, checked in the process that hands answers out, and put on each of its sequences.

The core's record comes with the output that ends a request; the tokens that it is about were counted here, and from
vLLM 0.32 on so were their versions. A record that is not exactly about these tokens is an error of that request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megastream.engine.vllm import compat_front
from megastream.engine.vllm.spans import KEY

logger = logging.getLogger("vllm.megastream")


class IncompleteRecord(RuntimeError):
    """An answer whose versions are not known for every token. Names the request, the record and the tokens."""


def patch() -> None:
    """Changes this process's front end, once. Nothing comes of it for an engine of another backend."""
    compat_front.wrap_answers(_recording, _carrying, _merging)


def fault(spans: list[dict[str, Any]], counted: list[tuple[str, int, int]] | None, num_tokens: int) -> str:
    """Why `spans` are not the record of `num_tokens` tokens; empty when they are. `counted`: see own_spans."""
    reached = 0
    for span in spans:
        if span["start"] != reached or span["end"] <= reached:
            return f"the span of version {span['version']} is [{span['start']}, {span['end']}), expected from {reached}"
        reached = span["end"]
    if reached != num_tokens:
        return f"the versions of {reached} tokens are known, {num_tokens} were made"
    if counted is not None and counted != [(span["version"], span["start"], span["end"]) for span in spans]:
        return f"vLLM's own count is {counted}"
    return ""


def _recording(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_request_output(
        self: Any,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        kv_transfer_params: dict[str, Any] | None = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        if finish_reason is not None and kv_transfer_params and KEY in kv_transfer_params:
            error = "" if compat_front.is_session(self) else _fault_of(self, kv_transfer_params[KEY])
            if error:
                logger.error("request %s: %s", self.external_req_id, error)
                compat_front.fail(self, IncompleteRecord(f"request {self.external_req_id}: {error}"))
                return None
            compat_front.carry(self, kv_transfer_params)
        return make(self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, *rest, **named)

    return make_request_output


def _fault_of(state: Any, spans: list[dict[str, Any]]) -> str:
    error = fault(spans, compat_front.own_spans(state), compat_front.num_tokens(state))
    return f"the record of its versions, {spans}, is not complete: {error}; ask it again" if error else ""


def _carrying(make: Callable[..., Any]) -> Callable[..., Any]:
    def new_completion_output(self: Any, *args: Any, **named: Any) -> Any:
        completion = make(self, *args, **named)
        compat_front.hand_over(self, completion)
        return completion

    return new_completion_output


def _merging(add: Callable[..., None]) -> Callable[..., None]:
    def merge(self: Any, later: Any, aggregate: bool) -> None:
        add(self, later, aggregate)
        compat_front.merge_records(self, later)

    return merge
