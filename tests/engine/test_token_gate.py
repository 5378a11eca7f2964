"""What stands before vLLM's endpoints, without a server: the token, and the refusal of answers without a record."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.helpers.engine import set_environment

set_environment()

from fastapi import APIRouter, FastAPI  # noqa: E402

from megastream.engine.vllm import compat, compat_front, routes, serving  # noqa: E402
from megastream.engine.vllm.record_gate import RecordGate  # noqa: E402
from megastream.engine.vllm.token_gate import TokenGate, read_token  # noqa: E402

TOKEN = "0123456789abcdef"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def status(gate: Any, path: str, headers: dict[str, str], **scope: Any) -> int:
    """200 when the request went through."""
    sent: list[dict[str, Any]] = []
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(gate({"type": "http", "path": path, "headers": raw, **scope}, None, send))
    return sent[0]["status"]


async def through(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200})


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return tmp_path / "token"


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/pause", BEARER, 200),
        ("/pause", {"authorization": f"bearer {TOKEN}", "content-type": "application/json; charset=utf-8"}, 200),
        ("/pause", {}, 401),
        ("/pause/", {}, 401),
        ("/root/pause", {}, 401),
        ("/pause", {"authorization": TOKEN}, 401),
        ("/pause", {"authorization": f"Basic {TOKEN}"}, 401),
        ("/pause", {"authorization": f"Bearer {TOKEN}x"}, 401),
        ("/pause", {**BEARER, "content-type": "application/octet-stream"}, 415),
        ("/v1/completions", {}, 200),
    ],
)
def test_only_who_has_the_token_gets_through(
    token_file: Path, path: str, headers: dict[str, str], expected: int
) -> None:
    gate = TokenGate(through, frozenset({"/pause"}), read_token(str(token_file)))
    root = {"root_path": "/root"} if path.startswith("/root") else {}
    assert status(gate, path, headers, **root) == expected


def test_without_a_token_file_they_are_closed() -> None:
    assert status(TokenGate(through, frozenset({"/pause"}), None), "/pause", BEARER) == 403


@pytest.mark.parametrize(
    ("text", "named"), [("short", "at least 16"), ("0123456789 abcdef", "without spaces"), ("", "at")]
)
def test_a_token_that_is_none_is_refused_by_the_name_of_its_file(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/token must hold .*{named}"):
        read_token(str(tmp_path / "token"))
    with pytest.raises(ValueError, match=f"{tmp_path}/none cannot be read"):
        read_token(str(tmp_path / "none"))


def import_routers() -> list[Any]:
    """vLLM's modules that pause it, change weights and call workers' methods, where this version has them."""
    updates = "rl.online" if compat.version() >= (0, 32, 0) else "serve.dev.rlhf"
    return [import_module(f"vllm.entrypoints.{place}.api_router") for place in (updates, "serve.dev.rpc")]


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize(
    ("backend", "dev", "guarded"), [("megastream", True, True), ("megastream", False, False), ("nccl", True, False)]
)
def test_an_application_is_changed_for_our_backend_only(
    monkeypatch: pytest.MonkeyPatch, token_file: Path, backend: str, dev: bool, guarded: bool, is_built: bool
) -> None:
    """Every endpoint of vLLM's development packages is behind the gate, the one that calls workers' methods too."""
    import_routers()
    patched: list[bool] = []
    monkeypatch.setattr(compat, "dev_mode", lambda: dev)
    monkeypatch.setattr(routes, "patch", lambda: patched.append(True))
    made = FastAPI()
    made.middleware_stack = through if is_built else None
    made.build_middleware_stack = lambda: through  # type: ignore[method-assign]
    settings = SimpleNamespace(token_file=str(token_file), attachable=False)
    build = serving._with_routes(lambda args: made, lambda args: settings)
    app = build(SimpleNamespace(weight_transfer_config={"backend": backend}))
    assert bool(patched) == (backend == "megastream")
    for path in ("/pause", "/update_weights", "/finish_weight_update", "/collective_rpc", "/v1/completions"):
        assert status(app, path, BEARER) == 200
        assert status(app, path, {}) == (401 if guarded and path != "/v1/completions" else 200)


@pytest.mark.parametrize("place", ["serve.dev.rlhf", "rl.online", "rl"])
def test_endpoints_that_change_weights_are_found_where_versions_have_them(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """0.26 has them under `serve.dev.rlhf`, 0.32 under `rl.online`; elsewhere they would be open, and are refused."""
    monkeypatch.setattr(compat, "dev_mode", lambda: True)
    for module in import_routers():
        monkeypatch.delitem(sys.modules, module.__name__)
    app, router = FastAPI(), APIRouter()
    router.add_api_route("/update_weights", lambda: None, methods=["POST"])
    app.include_router(router)
    with pytest.raises(compat.UnsupportedVersion, match="serves /update_weights from a place that megastream does not"):
        compat_front.development_paths(app)
    module = ModuleType(f"vllm.entrypoints.{place}.api_router")
    module.router = router  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "/update_weights" in compat_front.development_paths(app)


def test_a_command_line_without_a_backend_is_none_of_ours() -> None:
    assert compat_front.backend_of(SimpleNamespace()) is None
    assert compat_front.backend_of(SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="x"))) == "x"


def generating_app() -> FastAPI:
    """Some of vLLM's endpoints, as functions of the modules in which vLLM has them; one is somebody else's."""
    app = FastAPI()
    for place, path in (
        ("openai.completion", "/v1/completions"),
        ("openai.chat_completion", "/v1/chat/completions/batch"),
        ("openai.responses", "/v1/responses"),
        ("anthropic", "/v1/messages"),
        ("anthropic", "/v1/messages/count_tokens"),
        ("serve.tokenize", "/tokenize"),
        ("", "/mine"),
    ):

        async def endpoint() -> None: ...

        endpoint.__module__ = f"vllm.entrypoints.{place}.api_router" if place else "mine"
        app.add_api_route(path, endpoint, methods=["POST"])

    async def socket() -> None: ...

    socket.__module__ = "vllm.entrypoints.speech_to_text.realtime.api_router"
    app.add_api_websocket_route("/v1/realtime", socket)
    return app


BLIND = {"/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/v1/realtime"}


@pytest.mark.parametrize("attachable", [True, False])
def test_what_generates_without_a_record_is_closed_while_a_trainer_can_attach(
    monkeypatch: pytest.MonkeyPatch, attachable: bool
) -> None:
    monkeypatch.setattr(routes, "patch", lambda: None)
    made = generating_app()
    assert compat_front.generating_paths(made) == {*BLIND, "/v1/completions"}
    made.middleware_stack = through
    settings = SimpleNamespace(token_file="", attachable=attachable)
    build = serving._with_routes(lambda args: made, lambda args: settings)
    app = build(SimpleNamespace(weight_transfer_config={"backend": "megastream"}))
    for path in BLIND - {"/v1/realtime"}:
        assert status(app, path, {}) == status(app, f"{path}/", {}) == (403 if attachable else 200), path
    for path in ("/v1/completions", "/v1/messages/count_tokens", "/tokenize", "/mine"):
        assert status(app, path, {}) == 200, path


def test_the_refusal_names_the_route_and_those_to_ask() -> None:
    said: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    gate = RecordGate(through, frozenset(BLIND), ("/v1/completions", "/v1/chat/completions"))
    for kind, path in (("http", "/v1/responses"), ("websocket", "/v1/realtime")):
        asyncio.run(gate({"type": kind, "path": path}, None, send))
    error = json.loads(said[1]["body"])["error"]
    assert (said[0]["status"], error["code"]) == (403, 403)
    assert "answers of /v1/responses would not say" in error["message"] and "/v1/chat/completions" in error["message"]
    assert said[2] == {"type": "websocket.close"}
