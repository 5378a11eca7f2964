"""How megastream gets into vLLM's processes: methods are wrapped, and no exception leaves a worker call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

from megastream.engine.vllm import compat

logger = logging.getLogger("vllm.megastream")


def wrap_method(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces `owner.name` (a class's or an instance's) by `make(original)`, once. UnsupportedVersion without one."""
    original = getattr(owner, name, None)
    if original is None:
        raise missing(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
    if not getattr(original, "megastream", False):
        replacement = make(original)
        functools.update_wrapper(replacement, original)
        replacement.megastream = True  # type: ignore[attr-defined]
        setattr(owner, name, replacement)


def missing(method: str) -> compat.UnsupportedVersion:
    """The error about a method that is not there to be wrapped."""
    return compat.UnsupportedVersion(
        f"vLLM {compat.version_text()} has no {method}, which megastream wraps; install a version that the tests run"
    )


class Guard:
    """Context that lets no exception out; `error` says what went wrong inside, empty when nothing did.

    An exception that leaves a worker call with more than one rank leaves the other ranks' replies in their queues: from
    then on every reply of the engine belongs to an earlier call. So nothing may leave one, of whatever class.
    """

    def __init__(self) -> None:
        self.error = ""

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = f"{type(error).__name__}: {error}"
        logger.error("a worker call failed", exc_info=error)
        return True
