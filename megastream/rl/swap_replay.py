"""Recorded requests for the swap experiment: a file with a line of JSON for each.

    {"at_s": 0.25, "prompt": "What is 3 + 4?", "answer_tokens": 48}
    {"at_s": 0.5, "prompt": [72, 101, 108, 108, 111], "answer_tokens": 16}

`at_s` counts from the beginning of the replay; the order of the lines does not matter. A prompt is text, for the
model's tokenizer, or tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from megastream.rl.swap_config import SwapConfig


class Arrival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line. `answer_tokens` are generated, no more and no less."""

    at_s: Annotated[float, Meta(ge=0, le=1e9)]
    prompt: Annotated[str, Meta(min_length=1)] | Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)]
    answer_tokens: Annotated[int, Meta(ge=1, le=2**20)]


def recorded(config: SwapConfig, vocab: int) -> list[Arrival]:
    """The requests of the configuration's replay, as they stand in its file; none where its traffic is live.

    ValueError names the file, and the line that does not fit the model; it also says when there are not enough tokens
    for all swaps. How long a text is only the engine finds out.
    """
    if config.replay is None:
        return []
    path, swap, found = Path(config.replay.file), config.swap, []
    for number, line in enumerate(_lines(path), 1):
        try:
            arrival = msgspec.json.decode(line, type=Arrival)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if reason := _refusal(arrival, vocab, config.engine.max_model_len):
            raise ValueError(f"{path}, line {number}: {reason}")
        found.append(arrival)
    least = (swap.swaps + 1) * swap.tokens_between
    if (tokens := sum(arrival.answer_tokens for arrival in found)) < least:
        raise ValueError(
            f"{path} asks for {tokens} tokens, and (swap.swaps + 1) x swap.tokens_between are {least}; record more, or "
            "lower one of them"
        )
    return found


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"replay.file {path} cannot be read: {error.strerror}") from error


def _refusal(arrival: Arrival, vocab: int, max_model_len: int) -> str | None:
    if isinstance(arrival.prompt, str):
        return None
    if max(arrival.prompt) >= vocab:
        return f"token {max(arrival.prompt)}; the model has {vocab}, from 0 on"
    if (tokens := len(arrival.prompt) + arrival.answer_tokens) >= max_model_len:
        return f"prompt and answer are {tokens} tokens; engine.max_model_len = {max_model_len} needs at least one more"
    return None
