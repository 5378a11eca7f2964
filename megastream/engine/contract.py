"""What the engine-neutral parts need from one engine, and what they offer it.

`LiveModel` is one engine rank's weights, `CorePort` the engine's scheduling loop. `engine/vllm/` implements both; a
second engine beside vLLM implements them in its own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megastream.layout.shard import RankLayout
from megastream.protocol.records import RankCommit

if TYPE_CHECKING:
    import torch


class LiveModelError(ValueError):
    """The live model cannot be patched in place, or cannot be read. Names the tensor, the rank and the remedy."""


ENGINE_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, OSError)
"""What code of an engine library raises, LiveModelError among it. Whoever calls a LiveModel catches these."""


@dataclass(frozen=True, slots=True)
class WholeLoad:
    """Seconds that a whole-model load took on one rank. `repair_s` is what only this platform's reload needs."""

    load_s: float
    repair_s: float


class LiveModel(Protocol):
    """One engine rank's live weights. Buffers are named after live parameters, in the layout of the weight loader."""

    def describe(self) -> RankLayout:
        """Layout for plan kind `stream`. LiveModelError names whatever cannot be written in place."""

    def describe_whole(self) -> RankLayout:
        """Layout for plan kind `whole`: one full tensor, under its HF name, for all that this rank's loader reads."""

    def read_live(self, buffer: str) -> torch.Tensor:
        """The bytes the engine computes with, in loader layout (shape of `describe`'s buffer). Worker thread only.

        Packed weights are read back through the live kernel, never from a copy kept aside.
        """

    def prepare(self, staging: Mapping[str, torch.Tensor]) -> Any:
        """Turns complete staging (flat, one tensor per buffer) into what `commit` needs. Any thread; may be slow."""

    def commit(self, prepared: Any) -> None:
        """Makes prepared weights live: copies and swaps only, idempotent. Only inside the engine's ordered call.

        Staging is written again after it returns: nothing live may alias what `prepare` was given. LiveModelError or
        RuntimeError when it fails; the agent then repeats it once.
        """

    def load_whole(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> WholeLoad:
        """The engine's own checkpoint reload, for gate `pause`. Only while the engine is paused, worker thread."""


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """Names the staged version that the ranks shall make live; `label` is what tokens are stamped with."""

    attachment: str
    incarnation: int
    version: int
    attempt: int

    @property
    def label(self) -> str:
        return str(self.version)


class CorePort(Protocol):
    """The engine core, as the coordinator sees it. Calls may come from any thread."""

    def commit(self, request: CommitRequest, done: Callable[[tuple[RankCommit, ...]], None]) -> None:
        """Enqueues one ordered, non-blocking commit on all ranks and returns at once.

        Every batch scheduled later is stamped with the request's version. No output with that stamp leaves the core
        before all ranks replied ok; otherwise the core discards it and is poisoned. `done` gets the replies, in a
        thread of the core, within the time of a step also when the engine is idle.
        """

    def call_ranks(self, op: str, payload: dict[str, Any], done: Callable[[tuple[dict[str, Any], ...]], None]) -> None:
        """Enqueues one ordered worker call `RankAgent.call(op, payload)` on every rank and returns at once.

        `op` and `payload` are plain data. `done` gets the ranks' replies in rank order, in a thread of the core, also
        when the engine is idle. Unlike `commit` it changes no stamp and holds back no output.
        """

    def poison(self, reason: str) -> None:
        """Aborts all requests as retryable and refuses new ones until a later commit succeeds on all ranks."""

    def live_version(self) -> int:
        """The version that the next scheduled batch is stamped with. 0 before the first commit."""
