"""Plan kind `stream`: pieces go into staging while the engine decodes; complete versions wait for a commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megastream.engine.compare import Comparison
from megastream.engine.contract import ENGINE_ERRORS, CommitRequest, LiveModel
from megastream.engine.parts import Part, Staged, cut
from megastream.engine.pull import Pull
from megastream.engine.scatter import scatter, target_regions
from megastream.engine.settings import EngineSettings
from megastream.engine.staging import StagingMemory, check_pull, copies_by_buffer, placement_of
from megastream.layout.shard import RankLayout
from megastream.plan.types import Plan
from megastream.protocol.header import PieceHeader
from megastream.protocol.mix import Gate
from megastream.protocol.staging import Key, PieceRefused, StagingTable, Verdict
from megastream.protocol.terms import Terms


class StreamSink:
    """Staging of one attachment on one engine rank. A version that arrives is cut for the gate that holds then."""

    def __init__(
        self,
        terms: Terms,
        plan: Plan,
        layout: RankLayout,
        live: LiveModel,
        settings: EngineSettings,
        sealed: Callable[[Key, int, float], None],
        units_sealed: Callable[[Key, frozenset[str]], None],
        gate: Gate = "version",
        is_overlay: bool = False,
    ) -> None:
        """`sealed(key, elements, prepare_s)` is called once per version. Under a gate in parts `units_sealed` is called
        before it, for each part, also for a single one: other ranks may hold more. Neither may block: a commit would
        wait. `is_overlay`: the plan writes some tensors only, on some ranks none, and leaves the rest of their buffers
        as it is.

        ProtocolError when the plan cannot be cut for the gate, or the gate needs more staging than the budget has.
        """
        self._plan, self._live, self._settings = plan, live, settings
        self._sealed, self._units_sealed = sealed, units_sealed
        pieces = plan.by_target.get(layout.rank, ())
        self.units = frozenset(piece.unit for piece in pieces)
        """Units of which this rank holds a part."""
        self.placement = placement_of(pieces, layout, settings)
        check_pull(self.placement, gate, is_overlay)
        self.pulled = frozenset(self.placement.pulled_units)
        """Those of them of which nothing is staged."""
        self._pull = Pull((piece for piece in pieces if piece.unit in self.pulled), layout, live, settings)
        self._pieces = tuple(piece for piece in pieces if piece.unit not in self.pulled)
        self._copies = copies_by_buffer(self._pieces)
        self._host = frozenset(buffer for bundle in self.placement.host for buffer in bundle.buffers)
        """Buffers of which nothing is prepared: they are written from host memory, inside the commit."""
        self._table = StagingTable(terms, plan, layout.rank, settings.staging_sets, self.pulled)
        self._memory = StagingMemory(
            layout,
            self._copies,
            settings.staging_sets,
            pin_memory=settings.pin_memory,
            device=settings.staging_device,
            host=self._host,
        )
        self._regions: dict[tuple[int, int], list[torch.Tensor]] = {}
        """Where pieces go, by staging set and piece: a set stays where it is."""
        self._is_overlay = is_overlay
        self._gate, self._parts = gate, cut(self._pieces, gate, shared=is_overlay)
        self._staged: dict[Key, Staged] = {}
        self._changed = threading.Condition()
        self._comparison: Comparison | None = None

    @property
    def num_bytes(self) -> int:
        """Staging that versions, or parts of them, lie in. Any thread."""
        with self._changed:
            used = set(range(self._settings.staging_sets)).difference(self._table.free_slots)
            return sum(map(self._memory.bytes_of, used))

    @property
    def tier_bytes(self) -> tuple[int, int]:
        """Staging that is allocated: bytes on the device, and in host memory. Any thread."""
        return self._memory.tier_bytes

    def choose(self, gate: Gate) -> None:
        """Another gate, for versions of which nothing has arrived. ProtocolError when the plan cannot be cut for it."""
        if gate != self._gate:
            check_pull(self.placement, gate, self._is_overlay)
            parts = cut(self._pieces, gate, shared=self._is_overlay)
            with self._changed:
                self._gate, self._parts = gate, parts

    def admit(self, header: PieceHeader, source: int) -> bool:
        """Waits while all staging sets hold versions that are not live yet: backpressure, not loss."""
        if header.unit in self.pulled:
            self._table.check(header, source)
            return self._pull.admit(_key(header), header)
        deadline = time.monotonic() + self._settings.liveness_s
        with self._changed:
            while (admission := self._table.admit(header, source)).verdict is Verdict.WAIT:
                if not self._changed.wait(deadline - time.monotonic()):
                    held = ", ".join(str(key.version) for key in self._table.staged)
                    raise PieceRefused(
                        f"version {header.version} found no staging set for {self._settings.liveness_s:.0f} s; engine "
                        f"rank {self._table.rank} holds versions {held}, which nobody accepted or withdrew"
                    )
            if admission.verdict is not Verdict.TAKE:
                return False
            self._trim()
            self._staged.setdefault(_key(header), Staged(self._parts, self._gate != "version"))
        self._memory.buffers(admission.slot)  # may allocate: not under the lock, for which a commit may wait
        return True

    def write(self, header: PieceHeader, payload: torch.Tensor) -> None:
        if header.unit in self.pulled:
            self._pull.write(_key(header), header, payload)
            return
        with self._changed:
            slot = self._table.slot_of(_key(header))
            buffers = self._memory.buffers(slot)
        self._memory.await_reads(slot)
        piece = self._plan.pieces[header.seq]
        if (regions := self._regions.get((slot, piece.seq))) is None:
            regions = self._regions[slot, piece.seq] = target_regions(piece, buffers.__getitem__)
        try:
            written = scatter(piece, payload, regions)
        except RuntimeError as error:
            what = f"piece {piece.seq} ({piece.unit}, version {header.version})"
            raise RuntimeError(f"{what} could not be written into staging: {error}") from error
        self._memory.finish_writes()
        with self._changed:
            if (staged := self._staged.get(_key(header))) is not None:
                staged.written += written

    def lost(self, header: PieceHeader) -> None:
        if header.unit in self.pulled:
            self._pull.lost(header)
            return
        with self._changed:
            self._table.lost(header)
            self._changed.notify_all()

    def settle(self, header: PieceHeader) -> None:
        """Counts the piece; prepares the part that it completes, in this lane's thread."""
        key = _key(header)
        if header.unit in self.pulled:
            return
        with self._changed:
            is_sealed, staged = self._table.arrived(header).unit, self._staged.get(key)
            self._changed.notify_all()
            if not is_sealed or staged is None:
                return
            index = next(i for i, part in enumerate(staged.parts) if header.unit in part.units)
            if not self._table.is_sealed(key, staged.parts[index].units) or not self._table.hold(key):
                return
            buffers = self._memory.buffers(self._table.slot_of(key))
        try:
            self._prepare(key, staged, index, buffers)
        finally:
            with self._changed:
                self._table.release(key)
                self._changed.notify_all()

    def _prepare(self, key: Key, staged: Staged, index: int, buffers: Mapping[str, torch.Tensor]) -> None:
        begin, part = time.monotonic(), staged.parts[index]
        on_device = {name: buffers[name] for name in part.buffers if name not in self._host}
        prepared = self._live.prepare(on_device, part.ranges)
        with self._changed:
            staged.prepared[index] = prepared
            staged.prepare_s += time.monotonic() - begin
            if staged.becomes_live_in_parts:
                self._table.stay(key)
                self._units_sealed(key, part.units)  # under the lock: the thread with the last part comes behind
            if len(staged.prepared) == len(staged.parts):
                self._sealed(key, staged.written, staged.prepare_s)

    def accepted(self, version: int, attempt: int) -> None:
        with self._changed:
            self._table.accepted(version, attempt)
            if self.pulled and not self._pieces:  # nothing else will say that this rank is ready
                self._sealed(Key(self._table.terms.incarnation, version, attempt), 0, 0.0)

    def withdrawn(self, version: int, attempt: int) -> None:
        """The version will not become whole: its staging is free again. Nothing of it may be committed afterwards."""
        with self._changed:
            self._table.withdrawn(version, attempt)
            self._trim()
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """No further piece is taken; what can be committed, also in part, stays until the sink is dropped."""
        self._pull.end(reason)
        with self._changed:
            self._table.end()
            self._trim()
            self._changed.notify_all()

    def commit(self, request: CommitRequest) -> str:
        """Makes prepared units live; empty when it worked, else the reason. Worker thread, in the ordered call.

        Then pulls what is not staged, also behind a failure: the trainer waits until somebody has taken it.
        """
        key = Key(request.incarnation, request.version, request.attempt)
        error = self._commit_staged(key, request)
        if self.pulled and (request.units is None or self.pulled.intersection(request.units)):
            error = "; ".join(filter(None, (error, self._pull.run(key))))
        return error

    def _commit_staged(self, key: Key, request: CommitRequest) -> str:
        with self._changed:
            units = self.units - self.pulled
            wanted = units if request.units is None else units.intersection(request.units)
            if not wanted:  # others hold all of it
                self._forget_behind(request)
                return ""
            chosen, error = self._chosen(key, request.units)
            if not error and not self._table.hold(key):
                error = f"version {key.version}, attempt {key.attempt} has left staging"
            if error:
                return error
            slot = self._table.slot_of(key)
        try:
            error = self._write_live(chosen, slot)
            if error:  # absolute values from pinned staging: repeating is safe, whatever the first try left behind
                error = self._write_live(chosen, slot)
        finally:
            self._memory.reads(slot)
            with self._changed:
                self._table.release(key)
                self._forget_behind(request)
        return error

    def _forget_behind(self, request: CommitRequest) -> None:
        """Behind the last commit of a version nothing of it is needed any more."""
        if request.mix is None:
            self._forget(request.version)

    def _chosen(self, key: Key, units: tuple[str, ...] | None) -> tuple[list[tuple[Part, Any]], str]:
        """The parts of these units (of all) with what was prepared of them, or why they cannot be committed."""
        what = f"version {key.version}, attempt {key.attempt}"
        staged = self._staged.get(key)
        if staged is None:
            known = ", ".join(map(str, self._staged)) or "none"
            return [], f"{what} is not prepared here; staged are: {known}"
        return staged.chosen(units, what)

    def compare(self, key: Key) -> Comparison:
        """The comparison of a staged version with the live bytes, to be stepped on the worker's thread."""
        if self._comparison is None:
            with self._changed:
                staged = self._memory.buffers(self._table.slot_of(key)) if self._pieces else {}
                self._comparison = Comparison(self._live, staged, self._copies)
        return self._comparison

    def compare_pulled(self, key: Key, comparison: Comparison) -> None:
        """Adds what is not staged, which is pulled for it. Worker's thread; blocks. RuntimeError when it broke off."""
        copies = copies_by_buffer(self._pull.pieces)
        if copies and (error := self._pull.run(key, lambda name, came: comparison.add(name, came, copies[name]))):
            raise RuntimeError(error)

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
        there = self._table.staged
        self._staged = {key: staged for key, staged in self._staged.items() if key in there}

    def _write_live(self, chosen: list[tuple[Part, Any]], slot: int) -> str:
        buffers = self._memory.buffers(slot)
        try:
            self._live.commit(*(prepared for _, prepared in chosen))
            for part, _ in chosen if self._host else ():
                on_host = {name: buffers[name] for name in part.buffers if name in self._host}
                self._live.write_live(on_host, part.ranges)
        except ENGINE_ERRORS as error:
            return f"{type(error).__name__}: {error}"
        return ""


def _key(header: PieceHeader) -> Key:
    return Key(header.incarnation, header.version, header.attempt)
