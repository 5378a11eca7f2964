"""vLLM's development endpoints pause an engine and change its weights: in an engine of megastream they want a token."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

Call = Callable[[dict[str, Any], Any, Any], Awaitable[None]]

MIN_TOKEN_LENGTH = 16


def read_token(path: str) -> bytes:
    """The digest of the token that a file holds. ValueError names the file and what is wrong with it."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"megastream.token_file {path} cannot be read: {error}") from error
    if len(token) < MIN_TOKEN_LENGTH or not token.isprintable() or " " in token:
        raise ValueError(
            f"megastream.token_file {path} must hold one token of at least {MIN_TOKEN_LENGTH} printable characters "
            "without spaces, for example from `openssl rand -hex 32`"
        )
    return _digest(token)


class TokenGate:
    """ASGI middleware. Requests to `paths` need `Authorization: Bearer TOKEN`; without a token they are all refused."""

    def __init__(self, app: Call, paths: frozenset[str], token: bytes | None) -> None:
        self._app, self._paths, self._token = app, paths, token

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and path_of(scope) in self._paths:
            status, why = self._refusal(dict(scope["headers"]))
            if status:
                await answer(send, status, why)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes]) -> tuple[int, str]:
        """Status and reason; 0 when the request may go on."""
        if self._token is None:
            return 403, "this endpoint is closed: give megastream.token_file in --additional-config"
        scheme, _, given = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(_digest(given.strip()), self._token):
            return 401, "this endpoint needs the header Authorization: Bearer TOKEN, with that of megastream.token_file"
        if headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower() != b"application/json":
            return 415, "this endpoint takes application/json"
        return 0, ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def path_of(scope: dict[str, Any]) -> str:
    """The path that a request asks for, below the one that the application is mounted at."""
    return str(scope.get("path", "")).removeprefix(scope.get("root_path", "")).rstrip("/")


async def answer(send: Any, status: int, why: str | dict[str, Any]) -> None:
    """Sends an error in JSON, all of it."""
    body = json.dumps({"error": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
