"""`megastream serve` with a trainer: who made which token on every route, models at a version, /metrics, the token."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.helpers import reveal
from tests.helpers.engine import Server
from tests.helpers.served import TOKEN, Cold, Served, trained

pytestmark = pytest.mark.timeout(600)

Choice = dict[str, Any]
PROMPT = [20, 21, 22, 23]
TOKENS = 350
TWO: dict[str, Any] = {"max_tokens": TOKENS, "n": 2, "temperature": 0.01, "ignore_eos": True, "return_token_ids": True}
"""Two sequences; the weights leave sampling nothing to choose."""
COMPLETION: dict[str, Any] = {**TWO, "prompt": PROMPT}
CHAT: dict[str, Any] = {**TWO, "messages": [{"role": "user", "content": "abcd"}]}
ROUTES = ("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)


@pytest.fixture(scope="module")
def served(cold: Cold, control_url: str) -> Iterator[Served]:
    with trained(cold.server, control_url, cold.version) as served:
        served.update()
        yield served


def whole(server: Server, path: str, body: dict[str, Any]) -> list[Choice]:
    return server.post(path, body)["choices"]


def streamed(server: Server, path: str, body: dict[str, Any]) -> list[Choice]:
    """Choices put together from a stream; the record has to be on the chunk that ends a choice."""
    choices: dict[int, Choice] = {}
    for chunk in server.stream(path, body):
        assert "error" not in chunk, chunk
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"token_ids": []})
            assert "weight_versions" not in choice and ("weight_versions" in part) == bool(part.get("finish_reason"))
            choice["token_ids"] += part.get("token_ids") or []
            choice.update(
                {key: part[key] for key in ("finish_reason", "weight_versions", "kv_versions") if key in part}
            )
    return [choices[index] for index in sorted(choices)]


def labels(choice: Choice) -> list[str]:
    """The version of every token, as the record says."""
    out: list[str] = []
    for span in choice["weight_versions"]:
        assert span["start"] == len(out)
        out += [span["version"]] * (span["end"] - span["start"])
    assert len(out) == len(choice["token_ids"])
    return out


def check(choice: Choice, versions: set[str]) -> None:
    """The record is about these versions, and the tokens spell what it says."""
    said = labels(choice)
    assert set(said) == versions
    assert not any(reveal.is_mixed(token) for token in choice["token_ids"])
    wrong = [n for n, pair in enumerate(zip(choice["token_ids"], said, strict=True)) if reveal.is_mislabelled(*pair)]
    assert wrong == []


def test_every_choice_of_every_route_says_which_versions_made_it(served: Served) -> None:
    """n = 2, whole and streamed, through a commit; the truth is read from the tokens themselves."""
    ways: list[Callable[..., list[Choice]]] = [whole, streamed]
    asks = [lambda way=way, route=route: way(served.server, *route) for way in ways for route in ROUTES]
    before = served.version
    answers = served.meanwhile(*asks)
    for choices in answers:
        assert not isinstance(choices, Exception), choices
        assert len(choices) == 2
        for choice in choices:
            check(choice, {str(before), str(served.version)})
            assert choice["kv_versions"][0]["version"] == str(before), "the prompt's keys and values"
            assert choice["kv_versions"][-1]["end"] >= TOKENS + 3


def test_metrics_say_what_is_live_and_what_it_cost(served: Served) -> None:
    versions = served.metrics()
    served.update()
    end = served.metrics()
    name = 'megastream_commits_total{rank="0"}'
    for _ in range(100):  # the core reads the log meanwhile, and a worker writes its figures four times a second
        if end['megastream_committed_version{rank="0"}'] == served.version and end[name] > versions[name]:
            break
        time.sleep(0.05)
        end = served.metrics()
    assert end['megastream_committed_version{rank="0"}'] == served.version
    assert end['megastream_staged_version{rank="0"}'] == served.version
    assert end["megastream_attached"] == 1 and end["megastream_poisoned"] == 0
    assert end[name] == versions[name] + 1
    for name in ("commit_stall_seconds_total", "received_bytes_total"):
        assert end[f'megastream_{name}{{rank="0"}}'] > versions[f'megastream_{name}{{rank="0"}}'] >= 0
    assert end['megastream_staging_bytes{rank="0"}'] == 0, "nothing is on its way"
    assert end["megastream_overtaken_versions_total"] == versions["megastream_overtaken_versions_total"] == 0
    assert end["megastream_refused_attachments_total"] == end["megastream_failed_attachments_total"] == 0


def refused(ask: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(HTTPError) as caught:
        ask()
    return caught.value.code, caught.value.read().decode()


@pytest.mark.full
@pytest.mark.parametrize("route", ROUTES, ids=["completions", "chat"])
def test_a_model_at_a_version_is_exact_or_an_error(served: Served, route: tuple[str, dict[str, Any]]) -> None:
    path, body = route
    version = served.version
    short = {**body, "max_tokens": 4}
    for choice in whole(served.server, path, {**short, "model": f"m@{version}"}):
        check(choice, {str(version)})
    for model, why in [
        (f"m@{version - 1}", f"version {version} is live"),
        (f"m@{version + 1}", f"version {version} is live"),
        (f"other@{version}", "does not exist"),
        ("m@", "does not exist"),
    ]:
        code, text = refused(lambda model=model: whole(served.server, path, {**short, "model": model}))
        assert code == 404 and why in text
    exact = {**body, "model": f"m@{version}"}
    over, chunks = served.meanwhile(
        lambda: whole(served.server, path, exact), lambda: served.server.stream(path, exact)
    )
    assert isinstance(over, HTTPError) and over.code == 409
    assert f"version {version + 1} became live meanwhile" in over.read().decode()
    assert f"version {version + 1} became live meanwhile" in chunks[-1]["error"]["message"]


@pytest.mark.full
def test_beam_search_has_no_record_and_so_no_answer(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "n": 2, "use_beam_search": True}
    code, text = refused(lambda: whole(served.server, "/v1/completions", body))
    assert code == 409 and "no record of the versions" in text


class Opens:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_development_endpoints_want_the_token_and_take_no_pickle(cold: Cold, tmp_path: Path) -> None:
    server, bearer = cold.server, {"Authorization": f"Bearer {TOKEN}"}
    for headers in ({}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN[:-1]}"}):
        for path in ("/pause", "/update_weights", "/collective_rpc", "/sleep", "/reset_prefix_cache/"):
            assert refused(lambda path=path, h=headers: server.ask(path, b"{}", **h))[0] == 401
        assert refused(lambda h=headers: server.ask("/is_paused", **h))[0] == 401
    assert json.loads(server.ask("/is_paused", **bearer)) == {"is_paused": False}
    pickled = pickle.dumps({"update_info": Opens(tmp_path / "opened")})
    kind = {"Content-Type": "application/octet-stream"}
    for path in ("/update_weights", "/init_weight_transfer_engine", "/collective_rpc"):
        assert refused(lambda path=path: server.ask(path, pickled, **bearer, **kind))[0] == 415
        assert refused(lambda path=path: server.ask(path, pickled, **bearer))[0] in (400, 422)
    assert not (tmp_path / "opened").exists()
    assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["choices"], "and the others want none"


OPEN = "classify detokenize generative_scoring health invocations is_scaling_elastic_ep kv_event_sources load metrics"
OPEN += " ping pooling rerank scale_elastic_ep score tokenize tokenizer_info version"
"""vLLM's endpoints that neither pause an engine nor change its weights, beside those below a version (`/v1/...`)."""


@pytest.mark.full
def test_whatever_else_the_server_says_it_has_wants_the_token(cold: Cold) -> None:
    paths: dict[str, dict[str, Any]] = json.loads(cold.server.ask("/openapi.json"))["paths"]
    public = {f"/{name}" for name in OPEN.split()}
    closed = [path for path in paths if path not in public and not re.match(r"/(v\d|cohere|inference)/", path)]
    assert {"/pause", "/resume", "/update_weights", "/collective_rpc", "/sleep", "/wake_up"} <= set(closed)
    for path in closed:
        for method in paths[path]:
            body = None if method == "get" else b"{}"
            assert refused(lambda path=path, body=body: cold.server.ask(path, body))[0] == 401, path


@pytest.mark.full
def test_an_answer_that_a_pause_aborts_is_resumed_and_both_parts_have_a_record(served: Served) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with served.asking(lambda: whole(served.server, "/v1/completions", body)) as answer:
        served.server.ask("/pause?mode=abort", b"{}", **bearer)
    (first,) = answer()
    assert first["finish_reason"] == "abort" and 0 < len(first["token_ids"]) < TOKENS
    check(first, {str(served.version)})
    assert first["kv_versions"][-1]["end"] == len(PROMPT) + len(first["token_ids"]) - 1
    served.server.ask("/resume", b"{}", **bearer)
    before, rest = served.version, TOKENS - len(first["token_ids"])
    served.update()
    again = {**body, "prompt": [*PROMPT, *first["token_ids"]], "max_tokens": rest}
    (second,) = whole(served.server, "/v1/completions", again)
    check(second, {str(served.version)})
    assert labels(first) + labels(second) == [str(before)] * (TOKENS - rest) + [str(served.version)] * rest
    assert {span["version"] for span in second["kv_versions"]} == {str(served.version)}, "prompts are computed again"
