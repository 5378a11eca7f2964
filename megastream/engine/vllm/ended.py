"""Requests that vLLM itself ends as a whole (a pause that aborts, a shutdown) carry their record like all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megastream.engine.vllm import compat_core


def patch() -> None:
    """Changes the engine core in this process, once."""
    compat_core.wrap_finish(_carrying)


def _carrying(send: Callable[..., None]) -> Callable[..., None]:
    def send_finish_outputs(self: Any, request_ids: list[str], client_index: int, finish_reason: Any) -> None:
        if self.megastream is None:
            send(self, request_ids, client_index, finish_reason)
        else:
            carried = self.megastream.spans.carried
            compat_core.send_finished(self, request_ids, client_index, finish_reason, carried)

    return send_finish_outputs
