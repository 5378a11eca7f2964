"""Records of answers in the front end, without an engine: what is complete, what is not, and where a record goes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.engine import set_environment

set_environment()

from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402

from megastream.engine.vllm import compat_front, front, routes  # noqa: E402

Span = dict[str, Any]


def span(version: str, start: int, end: int) -> Span:
    return {"version": version, "start": start, "end": end}


SPANS = [span("3", 0, 2), span("4", 2, 5)]


@pytest.mark.parametrize(
    ("spans", "counted", "num_tokens", "named"),
    [
        (SPANS, [("3", 0, 2), ("4", 2, 5)], 5, ""),
        (SPANS, None, 5, ""),
        ([], [], 0, ""),
        (SPANS, None, 6, "versions of 5 tokens are known, 6 were made"),
        ([], None, 1, "versions of 0 tokens are known, 1 were made"),
        ([span("3", 1, 5)], None, 5, r"version 3 is \[1, 5\), expected from 0"),
        ([span("3", 0, 2), span("4", 3, 5)], None, 5, r"version 4 is \[3, 5\), expected from 2"),
        ([span("3", 0, 0), span("4", 0, 5)], None, 5, r"version 3 is \[0, 0\)"),
        (SPANS, [("3", 0, 3), ("4", 3, 5)], 5, "vLLM's own count is"),
        (SPANS, [], 5, "vLLM's own count is"),
    ],
)
def test_a_record_is_about_all_tokens_or_not_complete(
    spans: list[Span], counted: Any, num_tokens: int, named: str
) -> None:
    found = front.fault(spans, counted, num_tokens)
    assert bool(found) == bool(named) and re.search(named, found), found


class State:
    """What of a request's state in the front end is looked at. `own`: what vLLM 0.32 has counted; None before it."""

    external_req_id, streaming_input, input_chunk_queue = "r", False, None

    def __init__(self, num_tokens: int, own: list[Any] | None = None, queue: list[Any] | None = None) -> None:
        self.detokenizer = SimpleNamespace(num_output_tokens=lambda: num_tokens)
        self.queue = None if queue is None else SimpleNamespace(put=queue.append)
        if own is not None:
            self._weight_version_spans = lambda: own

    def make(self, *args: Any) -> CompletionOutput:
        return front._carrying(lambda self: completion())(self)


def completion(index: int = 0) -> CompletionOutput:
    made = CompletionOutput(index=index, text="", token_ids=[1], cumulative_logprob=None, logprobs=None)
    made.finish_reason = "length"
    return made


def finish(state: State, carried: dict[str, Any] | None, reason: Any = "length") -> Any:
    return front._recording(State.make)(state, [1], None, reason, None, carried)


KV = [span("3", 0, 9)]
CARRIED = {"weight_versions": SPANS, "kv_versions": KV}


def test_a_complete_record_is_on_the_sequence_that_it_is_about() -> None:
    """Before 0.32 in vLLM's later form too."""
    made = finish(State(5), CARRIED)
    assert [(s.version, s.start, s.end) for s in made.weight_versions] == [("3", 0, 2), ("4", 2, 5)]
    assert made.kv_versions == KV and compat_front.record_of(made) == CARRIED
    native = [SimpleNamespace(**one) for one in SPANS]
    assert finish(State(5, own=native), CARRIED).kv_versions == KV


def test_an_incomplete_record_is_an_error_of_its_request_and_of_no_other() -> None:
    told: list[Any] = []
    assert finish(State(6, queue=told), CARRIED) is None
    assert isinstance(told[0], front.IncompleteRecord) and "6 were made; ask it again" in str(told[0])
    with pytest.raises(front.IncompleteRecord, match="request r: the record of its versions"):
        finish(State(6), CARRIED)


def test_what_is_no_end_or_no_record_passes() -> None:
    assert finish(State(6), CARRIED, reason=None) is not None
    assert finish(State(6), {"remote_host": "h"}) is not None
    session = State(6)
    session.streaming_input = True
    assert finish(session, CARRIED) is not None


@pytest.mark.parametrize("aggregate", [True, False])
def test_a_record_survives_being_added_to_an_output_that_nobody_took(aggregate: bool) -> None:
    waiting, last = ([completion(index) for index in (0, 1)] for _ in range(2))
    for one in waiting:
        one.finish_reason = None
    last[1] = finish(State(5), CARRIED)
    last[1].index = 1
    outputs = [RequestOutput("r", None, [1], None, both, False) for both in (waiting, last[1:])]
    front._merging(getattr(RequestOutput.add, "__wrapped__", RequestOutput.add))(*outputs, aggregate)
    assert compat_front.record_of(outputs[0].outputs[1]) == CARRIED
    assert compat_front.record_of(outputs[0].outputs[0]) is None


# -- routes ------------------------------------------------------------------------------------------------------------


class Routes:
    models = SimpleNamespace(is_base_model=lambda name: name in (None, "m", "odd@7"))
    engine_client = SimpleNamespace()

    def create_error_response(self, message: str, *kind: Any) -> Any:
        return SimpleNamespace(error=message, kind=kind)

    def create_streaming_error_response(self, message: str, *kind: Any) -> str:
        return json.dumps({"error": message})

    async def stream(self, request: Any, result_generator: Any) -> AsyncIterator[str]:
        async for _, output in result_generator:
            for one in output.outputs:
                choice = {"index": one.index, "text": '"finish_reason":"é', "finish_reason": one.finish_reason}
                yield f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False, separators=(',', ':'))}\n\n"
        yield "data: [DONE]\n\n"


def lines(model: str | None, *completions: CompletionOutput) -> list[str]:
    async def results() -> AsyncIterator[Any]:
        for one in completions:
            yield 0, SimpleNamespace(outputs=[one])

    async def told() -> list[str]:
        request = SimpleNamespace(model=model, n=2)
        return [line async for line in routes._stream(Routes.stream)(Routes(), request, result_generator=results())]

    return asyncio.run(told())


def unfinished() -> CompletionOutput:
    made = completion()
    made.finish_reason = None
    return made


def test_the_chunk_that_ends_a_choice_carries_its_record() -> None:
    first, last, done = lines("m", unfinished(), finish(State(5), CARRIED))
    assert "weight_versions" not in first and done == "data: [DONE]\n\n"
    (choice,) = json.loads(last.removeprefix("data: "))["choices"]
    assert choice["weight_versions"] == SPANS and choice["kv_versions"] == KV
    assert choice["text"] == '"finish_reason":"é' and last.endswith("}\n\n")


def test_a_choice_without_a_record_ends_the_stream_with_an_error() -> None:
    error, done = lines("m", completion())
    assert "choice 0 has no record of the versions" in error and done == "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("model", "refused"), [("m@4", "version 3 became live"), ("odd@7", ""), ("m", ""), (None, ""), ("m@x", "")]
)
def test_an_answer_by_more_versions_than_were_asked_for_is_an_error(model: str | None, refused: str) -> None:
    *_, last, _ = lines(model, finish(State(5), CARRIED))
    assert (refused in last) if refused else "weight_versions" in last


@pytest.mark.parametrize(
    ("model", "name", "version"),
    [("m@7", "m", "7"), ("a@b@12", "a@b", "12"), ("m", "m", ""), ("m@", "m@", ""), ("m@main", "m@main", "")],
)
def test_names_are_split_at_the_last_version(model: str, name: str, version: str) -> None:
    assert routes.split(model) == (name, version)
