"""What the plugin changes in a process that serves HTTP, when the engine behind it is one of megastream's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from megastream.engine.vllm import compat_front, routes
from megastream.engine.vllm.backend import NAME
from megastream.engine.vllm.record_gate import RecordGate
from megastream.engine.vllm.token_gate import TokenGate, read_token


class ServeSettings(Protocol):
    """What of the plugin's settings says how HTTP is served."""

    @property
    def token_file(self) -> str:
        """See PluginSettings."""

    @property
    def attachable(self) -> bool:
        """Whether a trainer can attach."""


Read = Callable[[Any], ServeSettings]
"""The settings, from the arguments of `vllm serve`."""


def patch(read: Read) -> None:
    """Changes what builds the server's application, where this process has it."""
    compat_front.wrap_app(lambda build: _with_routes(build, read))


def _with_routes(build: Callable[..., Any], read: Read) -> Callable[..., Any]:
    def build_app(args: Any, *rest: Any, **named: Any) -> Any:
        if compat_front.backend_of(args) != NAME:
            return build(args, *rest, **named)
        settings = read(args)
        token = read_token(settings.token_file) if settings.token_file else None
        routes.patch()
        app = build(args, *rest, **named)
        if paths := compat_front.development_paths(app):
            compat_front.wrap_requests(app, lambda inner: TokenGate(inner, paths, token))
        if settings.attachable:
            recorded = compat_front.recorded_paths()
            unrecorded = compat_front.generating_paths(app) - set(recorded)
            compat_front.wrap_requests(app, lambda inner: RecordGate(inner, unrecorded, recorded))
        return app

    return build_app
