"""The front end's part of `compat.py`: the process where outputs become answers, and answers become HTTP.

Nothing here imports vLLM's HTTP server by itself: only a process that runs one has it, and only that one is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from megastream.engine.vllm import compat, hooks

Make = Callable[[Callable[..., Any]], Callable[..., Any]]

_CARRIED = "megastream_carried"


# -- answers -----------------------------------------------------------------------------------------------------------


def wrap_answers(make_output: Make, make_completion: Make, merge: Make) -> None:
    """Wraps what turns a request's tokens so far into an output, inside of it what makes that of one sequence, and what
    adds an output to one that nobody has taken yet."""
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.output_processor import RequestState

    hooks.wrap_method(RequestState, "make_request_output", make_output)
    hooks.wrap_method(RequestState, "_new_completion_output", make_completion)
    hooks.wrap_method(RequestOutput, "add", merge)


def num_tokens(state: Any) -> int:
    """Tokens that a request has been given so far."""
    return int(state.detokenizer.num_output_tokens())


def is_session(state: Any) -> bool:
    """True for a request whose prompt comes in parts: it ends once for each of them."""
    return bool(state.streaming_input) or state.input_chunk_queue is not None


def own_spans(state: Any) -> list[tuple[str, int, int]] | None:
    """(version, start, end) as the front end itself counted them, from vLLM 0.32 on; None before."""
    count = getattr(state, "_weight_version_spans", None)
    if count is None:
        return None
    return [(span.version, span.start, span.end) for span in count() or ()]


def fail(state: Any, error: Exception) -> None:
    """Ends one request with an error: raised to whoever waits for its outputs, here where nobody does."""
    if state.queue is None:
        raise error
    state.queue.put(error)


def carry(state: Any, record: dict[str, Any]) -> None:
    """Keeps the record that came with a request's last output until its completion is made."""
    setattr(state, _CARRIED, record)


def hand_over(state: Any, completion: Any) -> None:
    """Puts the kept record on the completion: `kv_versions`, and as vLLM 0.32 does by itself `weight_versions`."""
    record = state.__dict__.pop(_CARRIED, None)
    if record is not None:
        setattr(completion, _CARRIED, record)
        completion.kv_versions = record.get("kv_versions")
        if own_spans(state) is None:
            completion.weight_versions = [WeightVersionSpan(span) for span in record["weight_versions"]]


def merge_records(merged: Any, later: Any) -> None:
    """An output has taken up a later one: the records of the completions that have ended in that one go along."""
    there = {completion.index: completion for completion in merged.outputs}
    for completion in later.outputs:
        for name in (_CARRIED, "kv_versions", "weight_versions"):
            if name in vars(completion):
                setattr(there[completion.index], name, getattr(completion, name))


def record_of(completion: Any) -> dict[str, Any] | None:
    """What a completion that has ended says of versions; None when it says nothing.

    One that was aborted by the front end has no record from the core, only the spans that vLLM 0.32 counts itself.
    """
    record: dict[str, Any] | None = getattr(completion, _CARRIED, None)
    spans = getattr(completion, "weight_versions", None)
    if record is None and spans is not None:
        return {"weight_versions": [{"version": s.version, "start": s.start, "end": s.end} for s in spans]}
    return record


class WeightVersionSpan:
    """As vLLM 0.32's own, for those before it."""

    def __init__(self, span: dict[str, Any]) -> None:
        self.version, self.start, self.end = span["version"], span["start"], span["end"]


# -- HTTP --------------------------------------------------------------------------------------------------------------


def wrap_app(make: Make) -> None:
    """Wraps what builds the HTTP server's application, where this process has it; `args` is its first argument."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.entrypoints.") and "build_app" in vars(module):
            hooks.wrap_method(module, "build_app", make)


def wrap_requests(app: Any, make: Make) -> None:
    """Puts what `make` returns in front of all requests. vLLM's own bootstrap has closed the list of middleware."""
    app.middleware_stack = make(app.middleware_stack or app.build_middleware_stack())


def backend_of(args: Any) -> str | None:
    """The weight transfer backend on the command line of `vllm serve`."""
    config = getattr(args, "weight_transfer_config", None)
    if config is None:
        return None
    return str(config["backend"] if isinstance(config, dict) else config.backend)


def completion_routes() -> type:
    """What serves /v1/completions."""
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    return OpenAIServingCompletion


def chat_routes() -> type:
    """What serves /v1/chat/completions."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    return OpenAIServingChat


_GENERATING_PACKAGES = tuple(
    f"vllm.entrypoints.{name}."
    for name in ("anthropic", "cohere", "generate", "openai", "scale_out.token_in_token_out", "speech_to_text")
)
"""Where the routers lie whose endpoints make tokens: those of 0.26 and of 0.32."""

_SILENT = frozenset(
    ("/v1/messages/count_tokens", "/cohere/v2/chat/render", "/inference/v1/abort_requests", "/abort_requests")
)
"""Their endpoints that take a request and make no token."""


def recorded_paths() -> tuple[str, ...]:
    """Paths whose answers say which versions made them. vLLM's own route has its own field for it, from 0.32 on."""
    ours = ("/v1/completions", "/v1/chat/completions")
    return (*ours, "/inference/v1/generate") if compat.version() >= (0, 32, 0) else ours


def generating_paths(app: Any) -> frozenset[str]:
    """Paths of vLLM's own endpoints that make tokens, as this process serves them, web sockets among them."""
    found = set()
    for route in app.routes:
        place = getattr(getattr(route, "endpoint", None), "__module__", None) or ""
        methods = getattr(route, "methods", None)  # None: a web socket
        if place.startswith(_GENERATING_PACKAGES) and (methods is None or "POST" in methods):
            found.add(str(route.path))
    return frozenset(found - _SILENT)


async def ask_core(routes: Any, utility: str) -> Any:
    """A core utility, asked from a route."""
    return await routes.engine_client.engine_core.call_utility_async(utility)


_DEVELOPMENT_PACKAGES = ("vllm.entrypoints.serve.dev.", "vllm.entrypoints.rl.")
"""Where the routers lie that vLLM adds in development mode. What changes weights is in `serve.dev.rlhf` in 0.26, and in
`rl.online` in 0.32."""

_CHANGING = frozenset(
    f"/{name}" for name in ("collective_rpc", "pause", "start_weight_update", "update_weights", "finish_weight_update")
)
"""Paths that both of them have, and that must never be served without the token."""


def development_paths(app: Any) -> frozenset[str]:
    """Paths of the endpoints that vLLM has only in development mode, as this process serves them.

    UnsupportedVersion when `app` serves one that changes weights and was not found among them.
    """
    found = frozenset(route.path for router in _development_routers() for route in router.routes)
    if missed := _CHANGING.intersection(getattr(route, "path", "") for route in app.routes) - found:
        raise compat.UnsupportedVersion(
            f"vLLM {compat.version_text()} serves {', '.join(sorted(missed))} from a place that megastream does not "
            "know, so a token would not be asked for there; start without VLLM_SERVER_DEV_MODE"
        )
    return found


def _development_routers() -> Iterator[Any]:
    if not compat.dev_mode():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(_DEVELOPMENT_PACKAGES) and name.endswith(".api_router"):
            yield module.router
