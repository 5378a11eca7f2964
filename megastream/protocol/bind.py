"""Builds the plan of an attachment from the layouts that every rank put on the control plane. Alike on all ranks."""

from __future__ import annotations

from megastream.families import FAMILIES
from megastream.layout.shard import RankLayout
from megastream.layout.wire import decode_layout, encode_layout
from megastream.plan import build_plan
from megastream.plan.types import Plan
from megastream.protocol.control import ControlLog
from megastream.protocol.records import Attach, PlanKind
from megastream.protocol.terms import ProtocolError


def trainer_blob(incarnation: int, rank: int) -> str:
    return f"trainer/{incarnation}/{rank}"


def engine_blob(engine: str, rank: int, kind: PlanKind) -> str:
    return f"engine/{engine}/{rank}/{kind}"


def put_layout(log: ControlLog, blob: str, layout: RankLayout) -> None:
    log.put_blob(blob, encode_layout(layout))


def plan_of(log: ControlLog, attach: Attach, engine_world_size: int) -> Plan:
    """The plan that an Attach asks for. Every layout must be there already: the Attach is written after them.

    ProtocolError names the family or the layout that is missing; ValueError what the plan refuses.
    """
    if attach.family not in FAMILIES:
        raise ProtocolError(f"model family {attach.family} has no table; known: {', '.join(sorted(FAMILIES))}")
    trainer = [_layout(log, trainer_blob(attach.incarnation, rank)) for rank in range(attach.trainer_world_size)]
    engine = [_layout(log, engine_blob(attach.engine, rank, attach.kind)) for rank in range(engine_world_size)]
    return build_plan(
        trainer,
        engine,
        FAMILIES[attach.family],
        kind=attach.kind,
        piece_bytes=attach.piece_bytes,
        experts_per_unit=attach.experts_per_unit,
        finality=attach.finality,
    )


def _layout(log: ControlLog, blob: str) -> RankLayout:
    data = log.get_blob(blob)
    if data is None:
        raise ProtocolError(f"layout {blob} is not on the control plane; did that rank report a failure at its start?")
    return decode_layout(data)
