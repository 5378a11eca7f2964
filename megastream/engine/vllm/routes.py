"""Records of versions on vLLM's routes, and models that are asked for as `model@version`.

`/v1/completions` and `/v1/chat/completions`: every choice carries `weight_versions`, and `kv_versions` beside it, in a
stream on the chunk that ends the choice. A choice without a record is an error.

`model@7` is answered by version 7 alone. Another version that is live when it is asked for is an error, and one that
becomes live before the answer has ended is too.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from megastream.engine.vllm import compat_front, hooks

VERSION_UTILITY = "megastream_version"


class RecordError(RuntimeError):
    """What is wrong with the versions of an answer, for its client."""


def megastream_version(core: Any) -> str:
    """Core utility: the version that the next batch is stamped with, no exact one in a mix; without ordered calls."""
    return str(core.megastream.label)


def patch() -> None:
    """Changes the routes of this process, once."""
    completion, chat = compat_front.completion_routes(), compat_front.chat_routes()
    hooks.wrap_method(completion, "request_output_to_completion_response", _completion)
    hooks.wrap_method(completion, "completion_stream_generator", _stream)
    hooks.wrap_method(chat, "chat_completion_full_generator", _chat)
    hooks.wrap_method(chat, "chat_completion_stream_generator", _stream)
    for routes in (completion, chat):
        hooks.wrap_method(routes, "_is_model_supported", lambda original: _knowing_versions(original, completion, chat))
        hooks.wrap_method(routes, "_check_model", _at_version)


def split(model: str | None) -> tuple[str, str]:
    """`model@7` -> (`model`, `7`); the version is empty without one."""
    name, at, version = (model or "").rpartition("@")
    return (name, version) if at and version.isdecimal() else (model or "", "")


def asked_version(routes: Any, model: str | None) -> str:
    """The version that a request wants, empty when any will do. A model may be served under a name with an @ in it."""
    return "" if routes.models.is_base_model(model) else split(model)[1]


class Records:
    """The records of one request's choices, kept as its outputs go by."""

    def __init__(self, routes: Any, request: Any) -> None:
        self.model, self.version = request.model, asked_version(routes, request.model)
        self._num_choices = request.n or 1
        self._records: dict[int, dict[str, Any] | None] = {}

    async def watch(self, results: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Lets outputs through: those of one prompt, or (prompt, output) of several."""
        async with aclosing(results) as items:
            async for item in items:
                prompt, output = item if isinstance(item, tuple) else (0, item)
                self.note(prompt * self._num_choices, output)
                yield item

    def note(self, first: int, output: Any) -> None:
        """Keeps what the output's completions that have ended say; choice `first` is that of the first one."""
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._records[first + completion.index] = compat_front.record_of(completion)

    def of(self, choice: int) -> dict[str, Any]:
        """The record of a choice that has ended. RecordError without one, or when it is not what was asked for."""
        record = self._records.get(choice)
        if record is None:
            raise RecordError(f"choice {choice} has no record of the versions that made it (beam search has none)")
        others = {span["version"] for span in record["weight_versions"]} - {self.version}
        if self.version and others:
            made_by = ", ".join(sorted(others))
            raise RecordError(f"the model `{self.model}` was asked for, but version {made_by} became live meanwhile")
        return {key: value for key, value in record.items() if key in ("weight_versions", "kv_versions")}

    def put_on(self, choices: list[Any]) -> None:
        """Every choice of a response gets its record."""
        for choice in choices:
            for key, value in self.of(choice.index).items():
                setattr(choice, key, value)


def _completion(original: Callable[..., Any]) -> Callable[..., Any]:
    def request_output_to_completion_response(
        self: Any, results: list[Any], request: Any, *args: Any, **named: Any
    ) -> Any:
        response, records = original(self, results, request, *args, **named), Records(self, request)
        first = 0
        for result in results:
            records.note(first, result)
            first += len(result.outputs)
        return _answered(self, response, records)

    return request_output_to_completion_response


def _chat(original: Callable[..., Any]) -> Callable[..., Any]:
    async def chat_completion_full_generator(*args: Any, **named: Any) -> Any:
        answer, records = _watched(original, args, named)
        return _answered(args[0], await answer, records)

    return chat_completion_full_generator


def _answered(routes: Any, response: Any, records: Records) -> Any:
    choices = getattr(response, "choices", None)
    if choices is None:  # an error already
        return response
    try:
        records.put_on(choices)
    except RecordError as error:
        return routes.create_error_response(str(error), "ConflictError", HTTPStatus.CONFLICT)
    return response


def _stream(original: Callable[..., Any]) -> Callable[..., Any]:
    async def stream_generator(*args: Any, **named: Any) -> AsyncIterator[str]:
        answer, records = _watched(original, args, named)
        async with aclosing(answer) as lines:
            async for line in lines:
                try:
                    yield _told(line, records)
                except RecordError as error:
                    text = args[0].create_streaming_error_response(str(error), "ConflictError", HTTPStatus.CONFLICT)
                    yield f"data: {text}\n\n"
                    yield "data: [DONE]\n\n"
                    return

    return stream_generator


def _watched(original: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Records]:
    """What a route's method makes of a request, and the records that are there when it has."""
    bound = inspect.signature(original).bind(*args, **named)
    given = bound.arguments
    records = Records(given["self"], given["request"])
    given["result_generator"] = records.watch(given["result_generator"])
    return original(*bound.args, **bound.kwargs), records


def _told(line: str, records: Records) -> str:
    """A line of a stream, with the records of the choices that end in it."""
    if '"finish_reason":"' not in line:
        return line
    chunk = json.loads(line.removeprefix("data: "))
    for choice in chunk["choices"]:
        if choice.get("finish_reason"):
            choice.update(records.of(choice["index"]))
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _knowing_versions(original: Callable[..., bool], *checked: type) -> Callable[..., bool]:
    """Only on routes that look at the answer's versions, not on those that share their code."""

    def is_model_supported(self: Any, model_name: str | None) -> bool:
        name, version = split(model_name)
        return original(self, model_name) or bool(version and type(self) in checked and original(self, name))

    return is_model_supported


def _at_version(original: Callable[..., Any]) -> Callable[..., Any]:
    async def check_model(self: Any, request: Any) -> Any:
        error = await original(self, request)
        version = asked_version(self, request.model)
        if error is not None or not version:
            return error
        live = await compat_front.ask_core(self, VERSION_UTILITY)
        if live == version:
            return None
        message = f"The model `{request.model}` is not served: version {live} is live."
        return self.create_error_response(message, "NotFoundError", HTTPStatus.NOT_FOUND, "model")

    return check_model
