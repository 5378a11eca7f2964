"""What the engine-neutral parts need from one engine, and what they offer it.

`LiveModel` is one engine rank's weights, `CorePort` the engine's scheduling loop. `engine/vllm/` implements both; a
second engine beside vLLM implements them in its own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from megastream.engine.parts import Ranges
from megastream.layout.shard import RankLayout
from megastream.protocol.mix import Mix
from megastream.protocol.records import RankCommit

if TYPE_CHECKING:
    import torch


class LiveModelError(ValueError):
    """The live model cannot be patched in place, or cannot be read. Names the tensor, the rank and the remedy."""


ENGINE_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, OSError)
"""What code of an engine library raises, LiveModelError among it. Whoever calls a LiveModel catches these."""


NO_RANGES: Mapping[str, Ranges] = MappingProxyType({})


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

    def prepare(self, staging: Mapping[str, torch.Tensor], ranges: Mapping[str, Ranges] = NO_RANGES) -> Any:
        """Turns staging (flat, one tensor per buffer) into what `commit` needs. Any thread; may be slow.

        Of a buffer in `ranges` only these elements are complete and become live. LiveModelError when they cannot be
        written without the rest.
        """

    def commit(self, *prepared: Any) -> None:
        """Makes prepared weights live: copies and swaps only, idempotent. Only inside the engine's ordered call.

        Staging is written again after it returns: nothing live may alias what `prepare` was given. LiveModelError or
        RuntimeError when it fails; the agent then repeats it once.
        """

    def write_live(self, staging: Mapping[str, torch.Tensor], ranges: Mapping[str, Ranges] = NO_RANGES) -> None:
        """`prepare` and `commit` in one, buffer by buffer, from staging in host memory: without a second copy of all of
        it, and slower. Only inside the engine's ordered call; idempotent. Staging and errors are as for these two.
        """

    def in_place(self, buffer: str) -> torch.Tensor | None:
        """The live memory of a buffer, flat, where it lies in the loader's layout; None where it has to be prepared."""

    def expert_use(self) -> Mapping[int, Sequence[float]]:
        """How often each global expert was chosen lately, by layer; infinite where that is not known yet.

        Every call halves the counts. Worker thread only; it does not wait for the device, so on a GPU it gives what was
        counted until the call before. LiveModelError when this engine does not count.
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
    units: tuple[str, ...] | None = None
    """What to write of it: these units, or all that there are."""
    mix: Mix | None = None
    """What live weights hold afterwards, when not every unit is at `version`."""
    over: int = -1
    """An overlay: `version` is this one with some tensors replaced, and heals no engine. -1: it has every tensor."""

    @property
    def label(self) -> str:
        return str(self.version) if self.mix is None else self.mix.label

    @classmethod
    def read(cls, payload: dict[str, Any]) -> CommitRequest:
        """Inverse of `asdict`."""
        mix = payload.get("mix")
        return cls(**{**payload, "mix": None if mix is None else Mix(**mix)})


class CorePort(Protocol):
    """The engine core, as the coordinator sees it. Calls may come from any thread."""

    def commit(self, request: CommitRequest, done: Callable[[tuple[RankCommit, ...]], None]) -> None:
        """Enqueues one ordered, non-blocking commit on all ranks and returns at once.

        Every batch scheduled later is stamped with the request's label. No output with that stamp leaves the core
        before all ranks replied ok; otherwise the core discards it and is poisoned. `done` gets the replies, in a
        thread of the core, within the time of a step also when the engine is idle. A poisoned core takes no mix and no
        overlay, and has a version written in every unit.
        """

    def call_ranks(self, op: str, payload: dict[str, Any], done: Callable[[tuple[dict[str, Any], ...]], None]) -> None:
        """Enqueues one ordered worker call `RankAgent.call(op, payload)` on every rank and returns at once.

        `op` and `payload` are plain data. `done` gets the ranks' replies in rank order, in a thread of the core, also
        when the engine is idle. Unlike `commit` it changes no stamp and holds back no output.
        """

    def poison(self, reason: str) -> None:
        """Aborts all requests as retryable and refuses new ones until a later commit succeeds on all ranks."""

    def live_version(self) -> int:
        """The newest version that was live in every unit before the next scheduled batch. 0 before the first commit."""
