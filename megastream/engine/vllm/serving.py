"""What the plugin changes in a process that serves HTTP, when the engine behind it is one of megastream's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megastream.engine.vllm import compat_front, routes
from megastream.engine.vllm.backend import NAME
from megastream.engine.vllm.token_gate import TokenGate, read_token


def patch(token_file: Callable[[Any], str]) -> None:
    """Changes what builds the server's application, where this process has it. `token_file`: see PluginSettings."""
    compat_front.wrap_app(lambda build: _with_routes(build, token_file))


def _with_routes(build: Callable[..., Any], token_file: Callable[[Any], str]) -> Callable[..., Any]:
    def build_app(args: Any, *rest: Any, **named: Any) -> Any:
        if compat_front.backend_of(args) != NAME:
            return build(args, *rest, **named)
        path = token_file(args)
        token = read_token(path) if path else None
        routes.patch()
        app = build(args, *rest, **named)
        if paths := compat_front.development_paths(app):
            compat_front.wrap_requests(app, lambda inner: TokenGate(inner, paths, token))
        return app

    return build_app
