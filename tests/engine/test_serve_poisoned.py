"""`megastream serve` whose engine is poisoned: clients are told to ask again, in the middle of a stream too. And the
routes that vLLM has beside those two: they carry a record, or are closed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.engine.test_serve import CHAT, COMPLETION, PROMPT, ROUTES, check, refused, streamed, whole
from tests.helpers import reveal
from tests.helpers.engine import Server
from tests.helpers.feed_faults import TOLD
from tests.helpers.served import TOKEN, Served, serve
from tests.helpers.told import Told, told

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

RUN = "served-faults"
GENERATE = "/inference/v1/generate"
LONG = 480


class Poisonable(Served):
    """A server whose commits a test can break, and its trainer."""

    def __init__(self, server: Server, trainer: Told) -> None:
        self.server, self.trainer = server, trainer

    @property
    def version(self) -> int:  # type: ignore[override]
        return self.trainer.version

    def update(self) -> int:
        return self.trainer.update()

    def poison(self) -> None:
        """The next version cannot be written: told to every rank, and made."""
        self._worker("feed_break_commits", 0, 2, True)
        assert all(TOLD in str(word) for word in self.trainer.fails())
        self._worker("feed_mend")

    def _worker(self, method: str, *args: Any) -> None:
        self.server.ask("/collective_rpc", {"method": method, "args": args}, Authorization=f"Bearer {TOKEN}")


@pytest.fixture(scope="module")
def server(control_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"worker_extension_cls": "tests.helpers.feed.Feeder", "enable_scale_out": True}
    with serve(tmp_path_factory.mktemp("served"), control_url, 0, RUN, **options) as server:
        yield server


@pytest.fixture(scope="module")
def served(server: Server, control_url: str) -> Iterator[Poisonable]:
    with told(control_url, RUN, reveal.BASE) as trainer:
        trainer.update()
        yield Poisonable(server, trainer)


def stream_error(server: Server, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Tokens that came, and the status in the error that ended the stream; 0 without one."""
    *chunks, last = server.stream(path, body)
    assert not any("error" in chunk for chunk in chunks)
    tokens = sum(len(part.get("token_ids") or ()) for chunk in chunks for part in chunk["choices"])
    return tokens, int(last.get("error", {}).get("code", 0))


def can_be_retried(status: int) -> bool:
    return 500 <= status < 600 and status != 501


def test_while_it_is_poisoned_both_routes_say_that_they_can_be_asked_again(served: Poisonable) -> None:
    """Requests that run, whole and streamed, and requests that come; with the next version all is as before."""
    server, before = served.server, served.version
    running: list[Callable[[], Any]] = []
    for path, body in ROUTES:
        long = {**body, "n": 1, "max_tokens": LONG}
        running.append(lambda path=path, body=long: server.post(path, body))
        running.append(lambda path=path, body=long: stream_error(server, path, body))
    with served.asking(*running) as answers:
        served.poison()
    for answer in answers.all()[::2]:
        assert isinstance(answer, HTTPError) and can_be_retried(answer.code), answer
    for tokens, status in answers.all()[1::2]:
        assert 0 < tokens < LONG and can_be_retried(status), (tokens, status)
    assert served.metrics()["megastream_poisoned"] == 1
    for path, body in ROUTES:
        short = {**body, "max_tokens": 4}
        assert can_be_retried(refused(lambda path=path, body=short: server.post(path, body))[0]), path
        tokens, status = stream_error(server, path, short)
        assert tokens == 0 and can_be_retried(status), path
    served.update()
    assert served.version == before + 2
    for way in (whole, streamed):
        for path, body in ROUTES:
            for choice in way(server, path, {**body, "max_tokens": 4}):
                check(choice, {str(served.version)})
    assert served.metrics()["megastream_poisoned"] == 0


def test_the_route_of_tokens_says_which_versions_made_them(served: Poisonable) -> None:
    """vLLM's own field, whole and streamed, through a commit: it is held against what the tokens spell."""
    parameters = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": parameters}
    before = served.version
    answer, chunks = served.meanwhile(
        lambda: whole(served.server, GENERATE, body), lambda: served.server.stream(GENERATE, body)
    )
    parts = [part for chunk in chunks for part in chunk["choices"]]
    said = [part["weight_versions"] for part in parts if part.get("weight_versions")]
    assert len(said) == 1, "on the chunk that ends the choice"
    joined = {"token_ids": [t for part in parts for t in part.get("token_ids") or ()], "weight_versions": said[0]}
    for choice in (*answer, joined):
        assert len(choice["token_ids"]) == LONG
        check(choice, {str(before), str(served.version)})


ANSWERED = {"/v1/completions", "/v1/chat/completions", GENERATE, "/invocations"}
"""`/invocations` hands on to the first two."""
MAKE_NO_TOKEN = "classify detokenize is_scaling_elastic_ep ping pooling rerank scale_elastic_ep score tokenize"
MAKE_NO_TOKEN += " abort_requests inference/v1/abort_requests v1/embeddings v1/messages/count_tokens v1/rerank v1/score"
MAKE_NO_TOKEN += " v2/embed v2/rerank v1/load_lora_adapter v1/unload_lora_adapter cohere/v2/chat/render"
BLIND: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "abcd", "max_output_tokens": 4},
    "/v1/messages": {"model": "m", "max_tokens": 4, "messages": CHAT["messages"]},
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]], "max_tokens": 4},
    "/cohere/v2/chat": {"model": "m", "messages": CHAT["messages"]},
    "/generative_scoring": {"query": "a", "items": ["b"]},
    "/v1/systemone": {"input": "a"},
    "/v1/audio/transcriptions": {},
    "/v1/audio/translations": {},
}


@pytest.mark.parametrize("path", [path for path in BLIND if "audio" not in path and "cohere" not in path])
def test_a_route_whose_answers_carry_no_record_is_closed(served: Poisonable, path: str) -> None:
    code, text = refused(lambda: served.server.ask(path, BLIND[path]))
    error = json.loads(text)["error"]
    assert (code, error["code"]) == (403, 403) and f"answers of {path} would not say" in error["message"]
    assert served.server.post("/v1/completions", {**COMPLETION, "max_tokens": 1})["choices"], "the others are open"


def test_no_route_that_takes_a_request_was_forgotten(server: Server) -> None:
    """All of the server's routes: a version of vLLM that has another one is looked at here first."""
    paths: dict[str, dict[str, Any]] = json.loads(server.ask("/openapi.json"))["paths"]
    silent = {f"/{name}" for name in MAKE_NO_TOKEN.split()}
    taking = {path for path, methods in paths.items() if "post" in methods}
    known = ANSWERED | silent | BLIND.keys()
    left = {path for path in taking - known if not path.endswith(("/render", "/derender", "/cancel"))}
    assert left and all(refused(lambda path=path: server.ask(path, b"{}"))[0] == 401 for path in left), left
