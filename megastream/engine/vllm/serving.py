"""What the plugin changes in a process that serves HTTP, when the engine behind it is one of megastream's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megastream.engine.vllm import compat_front, routes
from megastream.engine.vllm.backend import NAME


def patch() -> None:
    """Changes what builds the server's application, where this process has it."""
    compat_front.wrap_app(_with_routes)


def _with_routes(build: Callable[..., Any]) -> Callable[..., Any]:
    def build_app(args: Any, *rest: Any, **named: Any) -> Any:
        if compat_front.backend_of(args) == NAME:
            routes.patch()
        return build(args, *rest, **named)

    return build_app
