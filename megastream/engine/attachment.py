"""One attachment as one engine rank holds it: terms, plan, the sink for its pieces, the lanes that feed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megastream.engine.contract import LiveModel
from megastream.engine.inlet import Inlet, LaneReceiver
from megastream.engine.settings import EngineSettings
from megastream.engine.stream import StreamSink
from megastream.engine.whole import WholeSink
from megastream.layout.shard import RankLayout
from megastream.plan.types import Plan
from megastream.protocol.lane import LaneAddress
from megastream.protocol.mix import Gate
from megastream.protocol.part_records import UnitsSealed
from megastream.protocol.records import Attach, Bound, Failed, Record, Sealed
from megastream.protocol.staging import Key
from megastream.protocol.terms import Terms


@dataclass
class Attachment:
    """`end` may be called again and again."""

    terms: Terms
    plan: Plan
    sink: StreamSink | WholeSink
    inlet: Inlet
    ended: bool = False

    @property
    def received_bytes(self) -> int:
        """Payload and headers, from all lanes."""
        return self.inlet.num_bytes

    @property
    def staging_bytes(self) -> int:
        """Staging in use now; versions of kind whole are not staged."""
        return self.sink.num_bytes if isinstance(self.sink, StreamSink) else 0

    @property
    def tier_bytes(self) -> tuple[int, int]:
        """Staging that is allocated, in use or not: bytes on the device, and in host memory."""
        return self.sink.tier_bytes if isinstance(self.sink, StreamSink) else (0, 0)

    def said(self, rank: int, addresses: dict[int, LaneAddress]) -> Bound:
        """The record that this rank has built the plan, and what it does not stage."""
        pulled = self.sink.pulled if isinstance(self.sink, StreamSink) else ()
        return Bound(
            attachment=self.terms.attachment,
            side="engine",
            rank=rank,
            digest=self.plan.digest,
            addresses=addresses,
            units=tuple(unit for unit in self.plan.units if (unit, rank) in self.plan.elements),
            pulled=tuple(unit for unit in self.plan.units if unit in pulled),
        )

    def choose(self, gate: Gate) -> None:
        """Versions that arrive from here on are cut for `gate`; whole-model updates know none. ProtocolError when the
        plan cannot be cut for it."""
        if isinstance(self.sink, StreamSink) and not self.ended:
            self.sink.choose(gate)

    def end(self, reason: str) -> None:
        """Closes the lanes and drops what cannot be committed; of what can be, a commit may be under way."""
        if not self.ended:
            self.ended = True
            self.sink.end(reason)
            self.inlet.abort()


@dataclass(frozen=True, slots=True)
class Reports:
    """What one engine rank says of an attachment, as records for `post`."""

    terms: Terms
    rank: int
    post: Callable[[Record], None]

    def sealed(self, key: Key, elements: int, prepare_s: float) -> None:
        digest = self.terms.plan_digest
        self.post(
            Sealed(**self._version(key), rank=self.rank, plan_digest=digest, elements=elements, prepare_s=prepare_s)
        )

    def units_sealed(self, key: Key, units: frozenset[str]) -> None:
        digest, sealed = self.terms.plan_digest, tuple(sorted(units))
        self.post(UnitsSealed(**self._version(key), rank=self.rank, plan_digest=digest, units=sealed))

    def failed(self, reason: str) -> None:
        self.post(Failed(attachment=self.terms.attachment, side="engine", rank=self.rank, reason=reason))

    def _version(self, key: Key) -> dict[str, Any]:
        return {"attachment": self.terms.attachment, **key._asdict()}


def make_attachment(
    record: Attach,
    plan: Plan,
    layout: RankLayout,
    *,
    run_id: str,
    live: LiveModel,
    receiver: LaneReceiver,
    settings: EngineSettings,
    post: Callable[[Record], None],
    gate: Gate = "version",
) -> Attachment:
    """Staging and lanes for an Attach on the rank of `layout`. `post` gets its Sealed and Failed records.

    ProtocolError when the plan cannot be cut for the gate, or the gate needs more staging than the budget has.
    """
    terms = Terms(
        run_id=run_id,
        attachment=record.attachment,
        incarnation=record.incarnation,
        kind=record.kind,
        plan_digest=plan.digest,
        base_version=record.base_version,
    )
    reports = Reports(terms, layout.rank, post)
    sink: StreamSink | WholeSink
    if record.kind == "stream":
        said, is_overlay = (reports.sealed, reports.units_sealed), record.over >= 0
        sink = StreamSink(terms, plan, layout, live, settings, *said, gate, is_overlay)
    else:
        sink = WholeSink(terms, plan, layout, settings)
    return Attachment(terms, plan, sink, Inlet(receiver, plan, layout.rank, sink, settings, reports.failed))
