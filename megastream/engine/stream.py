"""Plan kind `stream`: pieces go into staging while the engine decodes; complete versions wait for a commit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from megastream.engine.compare import Comparison
from megastream.engine.contract import ENGINE_ERRORS, CommitRequest, LiveModel
from megastream.engine.scatter import scatter, target_regions
from megastream.engine.settings import EngineSettings
from megastream.engine.staging import StagingMemory, copies_by_buffer
from megastream.layout.shard import RankLayout
from megastream.plan.types import Plan
from megastream.protocol.header import PieceHeader
from megastream.protocol.staging import Key, PieceRefused, StagingTable, Verdict
from megastream.protocol.terms import Terms


class StreamSink:
    """Staging of one attachment on one engine rank. `sealed(key, elements, prepare_s)` is called once per version."""

    def __init__(
        self,
        terms: Terms,
        plan: Plan,
        layout: RankLayout,
        live: LiveModel,
        settings: EngineSettings,
        sealed: Callable[[Key, int, float], None],
    ) -> None:
        self._plan, self._live, self._settings, self._sealed = plan, live, settings, sealed
        self._copies = copies_by_buffer(plan.by_target.get(layout.rank, ()))
        self._table = StagingTable(terms, plan, layout.rank, settings.staging_sets)
        self._memory = StagingMemory(
            layout,
            self._copies,
            settings.staging_sets,
            pin_memory=settings.pin_memory,
            device=settings.staging_device,
        )
        self._regions: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Where pieces go, by staging set and piece: a set stays where it is."""
        self._prepared: dict[Key, Any] = {}
        self._written: Counter[Key] = Counter()
        """Elements that lie in staging, counted as they were written."""
        self._changed = threading.Condition()
        self._comparison: Comparison | None = None

    @property
    def num_bytes(self) -> int:
        """Staging that versions, or parts of them, lie in. Any thread."""
        with self._changed:
            used = set(range(self._settings.staging_sets)).difference(self._table.free_slots)
            return sum(map(self._memory.bytes_of, used))

    def admit(self, header: PieceHeader, source: int) -> bool:
        """Waits while all staging sets hold versions that are not live yet: backpressure, not loss."""
        deadline = time.monotonic() + self._settings.liveness_s
        with self._changed:
            while (admission := self._table.admit(header, source)).verdict is Verdict.WAIT:
                if not self._changed.wait(deadline - time.monotonic()):
                    held = ", ".join(str(key.version) for key in self._table.staged)
                    raise PieceRefused(
                        f"version {header.version} found no staging set for {self._settings.liveness_s:.0f} s; engine "
                        f"rank {self._table.rank} holds versions {held}, which nobody accepted or withdrew"
                    )
            if admission.verdict is Verdict.TAKE:
                self._memory.buffers(admission.slot)
                self._trim()
            return admission.verdict is Verdict.TAKE

    def write(self, header: PieceHeader, payload: torch.Tensor) -> None:
        with self._changed:
            slot = self._table.slot_of(_key(header))
            buffers = self._memory.buffers(slot)
        self._memory.await_reads(slot)
        piece = self._plan.pieces[header.seq]
        if (regions := self._regions.get((slot, piece.seq))) is None:
            regions = self._regions[slot, piece.seq] = target_regions(piece, buffers.__getitem__)
        written = scatter(piece, payload, regions)
        self._memory.finish_writes()
        with self._changed:
            self._written[_key(header)] += written

    def lost(self, header: PieceHeader) -> None:
        with self._changed:
            self._table.lost(header)
            self._changed.notify_all()

    def settle(self, header: PieceHeader) -> None:
        """Counts the piece; prepares the version that it completes, in this lane's thread."""
        key = _key(header)
        with self._changed:
            complete = self._table.arrived(header).rank and self._table.hold(key)
            self._changed.notify_all()
            if not complete:
                return
            buffers, elements = self._memory.buffers(self._table.slot_of(key)), self._written[key]
        begin = time.monotonic()
        try:
            prepared = self._live.prepare(buffers)
            with self._changed:
                self._prepared[key] = prepared
                self._trim()
        finally:
            with self._changed:
                self._table.release(key)
                self._changed.notify_all()
        self._sealed(key, elements, time.monotonic() - begin)

    def accepted(self, version: int, attempt: int) -> None:
        with self._changed:
            self._table.accepted(version, attempt)

    def withdrawn(self, version: int, attempt: int) -> None:
        """The version will not become whole: its staging is free again."""
        with self._changed:
            self._table.withdrawn(version, attempt)
            self._trim()
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """No further piece is taken; complete versions stay until the sink is dropped."""
        del reason  # nobody waits here for what the end could explain: a lane's thread meets its own error
        with self._changed:
            self._table.end()
            self._trim()
            self._changed.notify_all()

    def commit(self, request: CommitRequest) -> str:
        """Makes a prepared version live; empty when it worked, else the reason. Worker thread, in the ordered call."""
        key = Key(request.incarnation, request.version, request.attempt)
        with self._changed:
            prepared = self._prepared.get(key)
            if prepared is None:
                staged = ", ".join(map(str, self._prepared)) or "none"
                return f"version {key.version}, attempt {key.attempt} is not prepared here; prepared are: {staged}"
            if not self._table.hold(key):
                return f"version {key.version}, attempt {key.attempt} has left staging"
            slot = self._table.slot_of(key)
        try:
            error = self._write_live(prepared)
            if error:  # absolute values from pinned staging: repeating is safe, whatever the first try left behind
                error = self._write_live(prepared)
        finally:
            self._memory.reads(slot)
            with self._changed:
                self._table.release(key)
                self._forget(key.version)
        return error

    def compare(self, key: Key) -> Comparison:
        """The comparison of a staged version with the live bytes, to be stepped on the worker's thread."""
        if self._comparison is None:
            with self._changed:
                slot = self._table.slot_of(key)
                self._comparison = Comparison(self._live, self._memory.buffers(slot), self._copies)
        return self._comparison

    def passed(self, version: int) -> None:
        """`version` is live by now, committed or because it already was: its staging is free again."""
        with self._changed:
            self._forget(version)
            self._comparison = None

    def _forget(self, version: int) -> None:
        self._table.committed(version)
        self._trim()
        self._changed.notify_all()

    def _trim(self) -> None:
        """What was kept for a version goes with its staging: committed, overtaken, withdrawn or broken off."""
        staged = self._table.staged
        self._prepared = {key: prepared for key, prepared in self._prepared.items() if key in staged}
        self._written = Counter({key: count for key, count in self._written.items() if key in staged})

    def _write_live(self, prepared: Any) -> str:
        try:
            self._live.commit(prepared)
        except ENGINE_ERRORS as error:
            return f"{type(error).__name__}: {error}"
        return ""


def _key(header: PieceHeader) -> Key:
    return Key(header.incarnation, header.version, header.attempt)
