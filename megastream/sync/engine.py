"""The engine's facade, in the process that owns the generating engine (vLLM's AsyncLLM, or anything with its calls)."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from megastream.protocol.bind import get_units
from megastream.protocol.bounds import check_settings
from megastream.protocol.control import ControlLog
from megastream.protocol.journal import SyncError
from megastream.protocol.part_records import GateSet, SetGate
from megastream.protocol.records import (
    Accepted,
    Attach,
    Attached,
    Committed,
    Detached,
    EngineReady,
    Failed,
    Loaded,
    Record,
)
from megastream.sync.mixes import versions_of
from megastream.sync.reading import records_so_far

logger = logging.getLogger(__name__)

CALL_GRACE_S = 5.0
"""How much longer than the engine's own deadline a call into it may take, in seconds: its message says more."""

PAUSE_SLEEP_S = 0.020
"""vLLM's `pause_generation` always ends with a sleep of this length. It is accounted apart."""


@dataclass(frozen=True, slots=True)
class EngineSyncSettings:
    """Times in seconds."""

    load_s: float = 600.0
    """For one whole-model load on the slowest rank, and for any other call into the engine."""
    report_s: float = 60.0
    """For every rank's record of a load that has succeeded."""
    poll_s: float = 0.25
    """Longest time that one read of the log waits."""

    def __post_init__(self) -> None:
        check_settings(self, "engine sync setting")


@dataclass(frozen=True, slots=True)
class WholeRequest:
    """Stands for vLLM's WeightTransferUpdateRequest, of which only this attribute is read."""

    update_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WholeUpdate:
    """One paused update; seconds. The engine could not step for `stall_s`, which has neither sleep nor repair in it.

    `pause_s`: from the pause call until the engine stood still. `load_s` and `repair_s`: slowest rank.
    """

    version: int
    pause_s: float
    sleep_s: float
    stall_s: float
    load_s: float
    repair_s: float
    visible_unix_s: float


class PausableEngine(Protocol):
    """What `run_whole_updates` calls; vLLM's AsyncLLM has it. `update_weights` raises unless every rank loaded."""

    async def pause_generation(self, *, mode: Any, clear_cache: bool) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, request: Any) -> None: ...
    async def finish_weight_update(self) -> None: ...
    async def resume_generation(self) -> None: ...


@dataclass
class _Whole:
    """The attachment of kind `whole` that is followed now."""

    attach: Attach
    accepted: Accepted | None = None
    loaded: dict[int, Loaded] = field(default_factory=dict)
    failed: str = ""


class EngineSync:
    """Follows one engine's records. `engine` is the name that its EngineReady records carry."""

    def __init__(self, log: ControlLog, *, engine: str, settings: EngineSyncSettings | None = None) -> None:
        self._log, self.engine = log, engine
        self._settings = settings or EngineSyncSettings()
        self._after = "0"
        self._world_size = 0
        self._whole: _Whole | None = None
        self._stop = False

    def stop(self) -> None:
        """Ends `events` and `run_whole_updates` at their next look at the log. Any thread."""
        self._stop = True

    def events(self) -> Iterator[Record]:
        """Every record of the run that the log keeps, and as they come, until `stop`. Blocks: use a thread for it."""
        after = "0"
        while not self._stop:
            for position, record in self._log.read(after, self._settings.poll_s):
                after = position
                yield record

    def set_gate(self, gate: str) -> None:
        """Has the engine commit by another gate (see protocol.mix.Gate) from the next version on that arrives. Blocks.

        SyncError says why the engine stays at the gate it had, or that it did not answer within `load_s`.
        """
        request = uuid.uuid4().hex
        after = self._log.append(SetGate(engine=self.engine, gate=gate, request=request))
        deadline = time.monotonic() + self._settings.load_s
        while time.monotonic() < deadline:
            for position, record in self._log.read(after, self._settings.poll_s):
                after = position
                if isinstance(record, GateSet) and record.request == request:
                    if record.error:
                        raise SyncError(f"engine {self.engine} stays at gate {record.gate}: {record.error}")
                    return
        raise SyncError(
            f"engine {self.engine} did not answer for {self._settings.load_s:g} s when asked for gate {gate}"
        )

    def versions(self, label: str) -> dict[str, int]:
        """The version of every unit while tokens were stamped `label`, a mix like `6..7+3`. Reads the whole log.

        SyncError when what the log keeps does not say that the engine was ever there, or does not end in `report_s`;
        ProtocolError when the names of the units, which the engine left there, cannot be read.
        """
        records = records_so_far(self._log, self._settings.report_s)
        found = versions_of(records, partial(get_units, self._log), self.engine, label)
        if not found:
            raise SyncError(
                f"the log of this run does not say that engine {self.engine} was ever at {label!r}; it knows mixes of "
                f"two versions, like 6..7+3, for as long as it keeps the records of their commits"
            )
        return found

    async def run_whole_updates(
        self, llm: PausableEngine, on_update: Callable[[WholeUpdate], None] | None = None
    ) -> list[WholeUpdate]:
        """Gate `pause`: for every accepted version pauses the engine, lets it load, resumes it, and says so.

        Runs through one attachment of kind `whole`, from its Attach until it is detached; returns all its updates.
        SyncError when an update fails: the engine is then left paused, because its weights are not whole.
        """
        updates: list[WholeUpdate] = []
        while not self._stop:
            if await self._follow():
                return updates
            whole = self._whole
            if whole is None or whole.accepted is None or whole.failed:
                continue
            accepted, whole.accepted = whole.accepted, None
            update = await self._update(llm, whole, accepted)
            updates.append(update)
            if on_update is not None:
                on_update(update)
        return updates

    async def _update(self, llm: PausableEngine, whole: _Whole, accepted: Accepted) -> WholeUpdate:
        version = accepted.version
        whole.loaded.clear()
        called = time.monotonic()
        await self._call(llm.pause_generation(mode="keep", clear_cache=False), "pause", version)
        paused = time.monotonic()
        await self._call(llm.start_weight_update(), "start the update", version)
        request = WholeRequest({"version": version, "deadline_s": self._settings.load_s})
        await self._call(llm.update_weights(request), "load", version)
        # Our backend has set the label already; vLLM 0.26 takes no `weight_version` here.
        await self._call(llm.finish_weight_update(), "finish the update", version)
        await self._call(llm.resume_generation(), "resume", version)
        resumed, visible = time.monotonic(), time.time()
        await self._all_loaded(whole, version)
        load_s = max(record.load_s for record in whole.loaded.values())
        repair_s = max(record.repair_s for record in whole.loaded.values())
        stall_s = resumed - paused - repair_s
        committed = Committed(
            attachment=accepted.attachment,
            incarnation=accepted.incarnation,
            version=version,
            ranks=(),
            visible_unix_s=visible,
            stall_s=stall_s,
        )
        await asyncio.to_thread(self._log.append, committed)
        return WholeUpdate(
            version=version,
            pause_s=max(0.0, paused - called - PAUSE_SLEEP_S),
            sleep_s=PAUSE_SLEEP_S,
            stall_s=stall_s,
            load_s=load_s,
            repair_s=repair_s,
            visible_unix_s=visible,
        )

    async def _call(self, call: Awaitable[None], what: str, version: int) -> None:
        """A call into the engine, with an end. SyncError for whatever it raises: vLLM's client knows no kinds."""
        limit = self._settings.load_s + CALL_GRACE_S
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task}, timeout=limit)
            if not task.done():
                raise SyncError(
                    f"the host waited {limit:g} s for engine {self.engine} to {what} for version {version}; the engine "
                    f"may be left paused"
                )
        finally:
            task.cancel()
        if (error := task.exception()) is not None:
            raise SyncError(
                f"engine {self.engine} could not {what} for version {version} and may be left paused: {error}"
            ) from error

    async def _all_loaded(self, whole: _Whole, version: int) -> None:
        """Waits for what every rank says about its load. The engine runs again: nothing waits for this."""
        deadline = time.monotonic() + self._settings.report_s
        ranks = range(self._world_size)
        while missing := [str(r) for r in ranks if r not in whole.loaded or whole.loaded[r].version != version]:
            if time.monotonic() > deadline:
                raise SyncError(
                    f"the host waited {self._settings.report_s:g} s for engine ranks {', '.join(missing)} to say how "
                    f"they loaded version {version}; the engine serves it"
                )
            await self._follow()

    async def _follow(self) -> bool:
        """Takes what the log has; True when the followed attachment was detached."""
        detached = False
        for position, record in await asyncio.to_thread(self._log.read, self._after, self._settings.poll_s):
            self._after = position
            detached = self._take(record)
            if detached:
                break
        return detached

    def _take(self, record: Record) -> bool:
        match record:
            case EngineReady() if record.engine == self.engine:
                self._world_size = record.world_size
            case Attach() if record.engine == self.engine and record.kind == "whole":
                self._whole = _Whole(record)
            case _ if self._whole is not None and getattr(record, "attachment", "") == self._whole.attach.attachment:
                return self._take_own(self._whole, record)
        return False

    def _take_own(self, whole: _Whole, record: Record) -> bool:
        match record:
            case Accepted():
                whole.accepted = record
            case Committed() if whole.accepted is not None and record.version >= whole.accepted.version:
                whole.accepted = None
            case Loaded():
                whole.loaded[record.rank] = record
            case Failed():
                whole.failed = whole.failed or record.reason
            case Attached():
                logger.info("engine %s follows attachment %s", self.engine, record.attachment)
            case Detached():
                self._whole = None
                return True
        return False
