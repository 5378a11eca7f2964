"""One attachment as one engine rank holds it: terms, plan, the sink for its pieces, the lanes that feed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megastream.engine.contract import LiveModel
from megastream.engine.inlet import Inlet, LaneReceiver
from megastream.engine.settings import EngineSettings
from megastream.engine.stream import StreamSink
from megastream.engine.whole import WholeSink
from megastream.layout.shard import RankLayout
from megastream.plan.types import Plan
from megastream.protocol.records import Attach, Failed, Record, Sealed
from megastream.protocol.staging import Key
from megastream.protocol.terms import Terms


@dataclass
class Attachment:
    """`end` may be called again and again; nothing else changes it."""

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

    def end(self, reason: str) -> None:
        """Closes the lanes and drops partial versions; complete ones stay, a commit of one may be under way."""
        if not self.ended:
            self.ended = True
            self.sink.end(reason)
            self.inlet.abort()


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
) -> Attachment:
    """Staging and lanes for an Attach on the rank of `layout`. `post` gets its Sealed and Failed records."""
    terms = Terms(
        run_id=run_id,
        attachment=record.attachment,
        incarnation=record.incarnation,
        kind=record.kind,
        plan_digest=plan.digest,
        base_version=record.base_version,
    )

    def sealed(key: Key, elements: int, prepare_s: float) -> None:
        post(
            Sealed(
                attachment=terms.attachment,
                incarnation=key.incarnation,
                version=key.version,
                attempt=key.attempt,
                rank=layout.rank,
                plan_digest=terms.plan_digest,
                elements=elements,
                prepare_s=prepare_s,
            )
        )

    def failed(reason: str) -> None:
        post(Failed(attachment=terms.attachment, side="engine", rank=layout.rank, reason=reason))

    sink: StreamSink | WholeSink
    if record.kind == "stream":
        sink = StreamSink(terms, plan, layout, live, settings, sealed)
    else:
        sink = WholeSink(terms, plan, layout, settings)
    return Attachment(terms, plan, sink, Inlet(receiver, plan, layout.rank, sink, settings, failed))
