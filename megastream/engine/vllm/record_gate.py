"""vLLM's routes that generate and have no place for the record of versions in their answers: refused by name."""

from __future__ import annotations

from typing import Any

from megastream.engine.vllm.token_gate import Call, answer, path_of


class RecordGate:
    """ASGI middleware. Requests to `paths` are refused; `recorded` are those to ask instead."""

    def __init__(self, app: Call, paths: frozenset[str], recorded: tuple[str, ...]) -> None:
        self._app, self._paths, self._recorded = app, paths, recorded

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = path_of(scope) if scope["type"] in ("http", "websocket") else ""
        if path not in self._paths:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # before it was accepted: the client gets 403
        else:
            error = {"message": self._why(path), "type": "PermissionDeniedError", "code": 403}
            await answer(send, 403, error)

    def _why(self, path: str) -> str:
        return (
            f"answers of {path} would not say which versions of the weights made them, so it is closed where trainers "
            f"can attach; ask {' or '.join(self._recorded)}"
        )
