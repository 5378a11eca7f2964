"""What ranks put on the control plane to be bound, and the plan of an attachment from it. Alike on all ranks."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import msgspec

from megastream.families import FAMILIES
from megastream.layout.only import only
from megastream.layout.shard import RankLayout, Side
from megastream.layout.wire import decode_layouts, encode_layout
from megastream.plan import build_plan
from megastream.plan.types import Plan
from megastream.protocol.control import ControlLog
from megastream.protocol.follow import DATA_ERRORS, describe
from megastream.protocol.records import Attach, PlanKind
from megastream.protocol.terms import ProtocolError


def trainer_blob(incarnation: int, rank: int) -> str:
    return f"trainer/{incarnation}/{rank}"


def engine_blob(engine: str, rank: int, kind: PlanKind) -> str:
    return f"engine/{engine}/{rank}/{kind}"


def put_layout(log: ControlLog, blob: str, layout: RankLayout) -> None:
    log.put_blob(blob, encode_layout(layout))


def put_refusal(log: ControlLog, blob: str, reason: str) -> None:
    """Why there is no layout under this name: whoever looks for it says so. An empty reason takes one back."""
    log.put_blob(_refusal_blob(blob), reason.encode())


def _refusal_blob(blob: str) -> str:
    return f"{blob}/refused"


class EngineUnits(msgspec.Struct, frozen=True):
    """The engine of an attachment, and all units that its ranks hold together."""

    engine: str
    units: tuple[str, ...]


def units_blob(attachment: str) -> str:
    return f"units/{attachment}"


def put_units(log: ControlLog, attach: Attach, units: tuple[str, ...]) -> None:
    """By engine rank 0, before it says Bound: records of an attachment that lasts are forgotten, blobs are not."""
    log.put_blob(units_blob(attach.attachment), msgspec.json.encode(EngineUnits(attach.engine, units)))


def get_units(log: ControlLog, attachment: str) -> EngineUnits | None:
    """None for an attachment that no engine was bound to. ProtocolError when it cannot be read."""
    raw = log.get_blob(units_blob(attachment))
    try:
        return None if raw is None else msgspec.json.decode(raw, type=EngineUnits)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"blob {units_blob(attachment)} does not hold an engine's units: {error}") from error


def plan_of(
    log: ControlLog, attach: Attach, engine_world_size: int, own: tuple[Side, int], shelf: PlanShelf | None = None
) -> Plan:
    """The plan that an Attach asks for, on the rank `own`, which proves its part of it.

    Every layout must be there already: the Attach is written after them. ProtocolError names the family or the layout
    that is missing, why a rank of the engine has none, or what broke the planner; ValueError what the plan refuses.
    ControlError when the layouts cannot be fetched.
    """
    if attach.family not in FAMILIES:
        raise ProtocolError(f"model family {attach.family} has no table; known: {', '.join(sorted(FAMILIES))}")
    names = [trainer_blob(attach.incarnation, rank) for rank in range(attach.trainer_world_size)]
    trainer = [_fetch(log, name) for name in names]
    engine = [_fetch_of_engine(log, attach, rank) for rank in range(engine_world_size)]
    if shelf is None:
        return _build(attach, trainer, engine, own)
    return shelf.plan(attach, trainer, engine, own)


class PlanShelf:
    """Plans of one incarnation on one rank: engines with equal layouts share one. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def plan(self, attach: Attach, trainer: list[bytes], engine: list[bytes], own: tuple[Side, int]) -> Plan:
        options = (attach.kind, attach.family, attach.piece_bytes, attach.experts_per_unit, attach.finality)
        key = (*options, attach.over >= 0, *(hashlib.sha256(blob).digest() for blob in (*trainer, *engine)))
        with self._lock:
            if key not in self._plans:
                self._plans[key] = _build(attach, trainer, engine, own)
            return self._plans[key]


def _build(attach: Attach, trainer: list[bytes], engine: list[bytes], own: tuple[Side, int]) -> Plan:
    try:
        ours, theirs, is_overlay = decode_layouts(trainer), decode_layouts(engine), attach.over >= 0
        if is_overlay:
            names = {spec.name for layout in ours for spec in layout.tensors}
            theirs = [only(layout, names) for layout in theirs]
        return build_plan(
            ours,
            theirs,
            FAMILIES[attach.family],
            kind=attach.kind,
            piece_bytes=attach.piece_bytes,
            experts_per_unit=attach.experts_per_unit,
            finality=attach.finality,
            own=own,
            overlay=is_overlay,
        )
    except ValueError:
        raise
    except DATA_ERRORS as error:
        raise ProtocolError(
            f"attachment {attach.attachment}: its layouts and settings break the planner: {describe(error)}"
        ) from error


def _fetch_of_engine(log: ControlLog, attach: Attach, rank: int) -> bytes:
    blob = engine_blob(attach.engine, rank, attach.kind)
    if reason := log.get_blob(_refusal_blob(blob)):
        raise ProtocolError(f"engine {attach.engine}, rank {rank}: {reason.decode()}")
    return _fetch(log, blob)


def _fetch(log: ControlLog, blob: str) -> bytes:
    data = log.get_blob(blob)
    if data is None:
        raise ProtocolError(f"layout {blob} is not on the control plane; did that rank report a failure at its start?")
    return data
