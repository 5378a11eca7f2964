"""The records that a trainer rank writes about one version of its attachment, and about its end."""

from __future__ import annotations

from megastream.protocol.records import Accepted, Attach, Emitted, Failed, TrainingFinished
from megastream.protocol.step_records import UnderWay
from megastream.trainer.outgoing import EmitReport


def under_way(attach: Attach, rank: int, version: int, attempt: int) -> UnderWay:
    return UnderWay(
        attachment=attach.attachment, incarnation=attach.incarnation, version=version, attempt=attempt, rank=rank
    )


def emitted(attach: Attach, rank: int, report: EmitReport) -> Emitted:
    """What left this rank, for an attempt that counts or in vain."""
    return Emitted(
        attachment=attach.attachment,
        incarnation=attach.incarnation,
        version=report.version,
        attempt=report.attempt,
        rank=rank,
        pieces=report.pieces,
        payload_bytes=report.payload_bytes,
        wire_bytes=report.wire_bytes,
        elements=report.elements,
        wait_s=report.wait_s,
        withdrawn=report.withdrawn,
    )


def accepted(attach: Attach, version: int, attempt: int, train_step: int) -> Accepted:
    return Accepted(
        attachment=attach.attachment,
        incarnation=attach.incarnation,
        version=version,
        attempt=attempt,
        train_step=train_step,
    )


def training_finished(attach: Attach, version: int, reason: str) -> TrainingFinished:
    return TrainingFinished(
        attachment=attach.attachment, incarnation=attach.incarnation, version=version, reason=reason
    )


def failed(attachment: str, rank: int, reason: str, incarnation: int = 0) -> Failed:
    """`incarnation` is given where the trainer ends as a whole."""
    return Failed(attachment=attachment, side="trainer", rank=rank, reason=reason, incarnation=incarnation)
