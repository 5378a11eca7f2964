"""Tensors of a running engine replaced by hand: an attachment of overlays, of one version."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from megastream.protocol.bind import get_units
from megastream.protocol.control import ControlLog
from megastream.protocol.engines import EngineState, engines_of
from megastream.protocol.journal import SyncError
from megastream.sync.binding import TrainerModel
from megastream.sync.reading import is_here, records_so_far
from megastream.sync.trainer import TrainerSync
from megastream.trainer.settings import TrainerSettings

SEEN_S = 10.0
"""An engine that was on the control plane so long ago counts as up."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """What was done. `stall_s`: the slowest rank's time in the ordered call, in seconds."""

    engine: str
    over: int
    """The version that was live; all that was not swapped stays at it."""
    version: int
    units: tuple[str, ...]
    payload_bytes: int
    stall_s: float


def swap(log: ControlLog, tensors: TrainerModel, *, engine: str = "", deadline_s: float = 60.0) -> Swapped:
    """Puts `tensors` (all of it on this process) over what an engine serves, as a new version. Blocks until it is live.

    Without a name it is the only engine that is up. SyncError when there is none, when several are up or one of them is
    attached to a trainer, when the engine refuses, and after `deadline_s` of one wait; the engine then serves what it
    served, unless the error says that it is poisoned.
    """
    target = engine_to_swap(log, engine, deadline_s)
    settings = swap_settings(target.name, deadline_s)
    sync = TrainerSync(log, rank=0, world_size=1, trainer=tensors, settings=settings)
    try:
        version = sync.attach(over=target.live).version
        committed = sync.wait_committed(version, deadline_s)
        plan, report = sync.plan, sync.reports[-1]
        sync.finished("swapped")
    finally:
        sync.close()
    stall_s = max((rank.stall_s for rank in committed.ranks), default=0.0) if committed is not None else 0.0
    return Swapped(target.name, target.live, version, plan.units, report.payload_bytes, stall_s)


def swap_settings(engine: str, deadline_s: float) -> TrainerSettings:
    """Every expert is a unit of its own, and every wait ends after `deadline_s`."""
    waits: dict[str, Any] = dict.fromkeys(
        ("ready_s", "bind_s", "transfer_s", "attach_s", "lag_s", "detach_s"), deadline_s
    )
    return TrainerSettings(
        launch=uuid.uuid4().hex, engine=engine, finality="whole", experts_per_unit=1, slots_per_target=16, **waits
    )


def engine_to_swap(log: ControlLog, name: str, deadline_s: float) -> EngineState:
    """The engine of that name, or the only one that is up, if nothing stands against a swap. SyncError says what does.

    A trainer of any engine of the run does: versions are numbered for all of them together.
    """

    def engine_of(attachment: str) -> str:
        units = get_units(log, attachment)
        return "" if units is None else units.engine

    engines = engines_of(records_so_far(log, deadline_s), engine_of)
    here = [each for each in engines.values() if each.is_up and is_here(log, each.name, each.world_size, SEEN_S)]
    where = f"run {log.run_id} at {log.url}"
    if name and name not in engines:
        known = ", ".join(state.name for state in here) or "none"
        raise SyncError(f"no engine {name} has come up in {where}; up are: {known}")
    chosen = [state for state in here if name in ("", state.name)]
    if not chosen:
        raise SyncError(f"{f'engine {name} is not' if name else 'no engine is'} on the control plane of {where}")
    if len(chosen) > 1:
        raise SyncError(f"several engines are up in {where}: {', '.join(s.name for s in chosen)}; say which one")
    if held := [(state.name, *each) for state in here for each in state.attachments.items()]:
        engine, attachment, incarnation = held[0]
        raise SyncError(
            f"engine {engine} is attached to incarnation {incarnation} ({attachment}) in {where}, whose next version "
            f"would replace what is swapped; wait until that has ended"
        )
    if chosen[0].trouble:
        raise SyncError(f"engine {chosen[0].name} {chosen[0].trouble}; a whole version of a trainer has to come first")
    return chosen[0]
