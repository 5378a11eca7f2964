"""The terms of one attachment, and what is refused because it is reserved for later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megastream.protocol.bounds import MOST_COUNT, MOST_NUMBER, MOST_PIECE_BYTES
from megastream.protocol.records import PROTOCOL, Attach, EngineReady, PlanKind, TrainerReady


class ProtocolError(ValueError):
    """A record or piece contradicts what was agreed. One line: who, what, both values."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What both ends of an attachment agreed on before the first byte. Every piece and record is held against it."""

    run_id: str
    attachment: str
    incarnation: int
    kind: PlanKind
    plan_digest: str
    base_version: int


_EQUAL_RELEASES = "use equal releases of megastream on both sides"
_LATER = {
    "membership_epoch": (0, "membership epochs: every change of ranks needs a new run"),
    "namespace": ("base", "LoRA namespaces: only the base weights are streamed"),
    "encoding": ("dense", "delta pieces: every piece carries the values themselves"),
    "transfer": ("push", "pull transports: the trainer pushes, also what a commit asks for"),
    "replicas": ((), "lanes that feed several engines: every engine has an attachment and lanes of its own"),
    "commit_step": (-1, "commits at a step counter: one engine core commits by itself, data-parallel cores cannot"),
}

_BOUNDS = {
    "incarnation": (0, MOST_NUMBER),
    "base_version": (0, MOST_NUMBER),
    "over": (-1, MOST_NUMBER),
    "trainer_world_size": (1, MOST_COUNT),
    "piece_bytes": (1, MOST_PIECE_BYTES),
    "experts_per_unit": (1, MOST_COUNT),
}


def check_terms(attach: Attach) -> None:
    """ProtocolError when an Attach is of another protocol than this release, asks for anything that is typed but not
    built yet, or has a number out of bounds."""
    if attach.protocol != PROTOCOL:
        raise ProtocolError(
            f"attachment {attach.attachment}: the trainer speaks protocol {attach.protocol}, engine {attach.engine} "
            f"{PROTOCOL}; {_EQUAL_RELEASES}"
        )
    refuse_reserved(attach)
    for name, (least, most) in _BOUNDS.items():
        value = getattr(attach, name)
        if not least <= value <= most:
            raise ProtocolError(f"attachment {attach.attachment}: {name} must be {least} to {most}, got {value}")
    if attach.over >= attach.base_version or (attach.over >= 0 and attach.kind != "stream"):
        raise ProtocolError(
            f"attachment {attach.attachment}: its base version {attach.base_version}, of kind {attach.kind}, is no "
            f"overlay of version {attach.over}; an overlay is streamed, as a newer version"
        )


def check_alike(side: str, ready: Iterable[EngineReady | TrainerReady]) -> None:
    """ProtocolError when a rank of one side speaks another protocol than this release, or has another library than the
    others: what ranks make of the same layouts and buckets is only known to be alike in one release."""
    ranks = sorted(ready, key=lambda record: record.rank)
    for record in ranks:
        if record.protocol != PROTOCOL:
            raise ProtocolError(
                f"{side}, rank {record.rank} ({record.library}) speaks protocol {record.protocol}, this trainer "
                f"{PROTOCOL}; {_EQUAL_RELEASES}"
            )
        if record.library != ranks[0].library:
            raise ProtocolError(
                f"{side}: rank {record.rank} has {record.library}, rank {ranks[0].rank} has {ranks[0].library}; all "
                "ranks of a side need the same release"
            )


def refuse_reserved(attach: Attach) -> None:
    """Raises ProtocolError when an Attach asks for anything that is typed but not built yet."""
    for name, (supported, why) in _LATER.items():
        value = getattr(attach, name)
        if value != supported:
            raise ProtocolError(
                f"attachment {attach.attachment}: {name}={value!r} is not supported, only {supported!r} ({why})"
            )
