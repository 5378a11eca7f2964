"""What the emitter says went out is what the lanes counted, also when a version is withdrawn."""

from __future__ import annotations

import threading
from dataclasses import asdict

import pytest
import torch

from megastream.protocol.book import TrainerBook
from megastream.protocol.records import Emitted
from megastream.protocol.terms import ProtocolError
from megastream.trainer.outgoing import EmitError
from tests.helpers.emit import RANK, FakeLane, buffers, emitter, many, piece, plan, rows
from tests.helpers.spine import eventually


def test_the_report_is_what_the_lanes_counted() -> None:
    """Not what the plan asked for: only then can the manifest's comparison of both fail."""
    with emitter({0: FakeLane(short=8), 1: FakeLane()}) as emit:
        emit.begin(1, 0)
        emit.final("one")
        emit.final("two")
        report = emit.drain()
    assert (report.pieces, report.payload_bytes, report.elements) == (3, 120 - 16, 42 - 2 - 4)
    emitted = Emitted(attachment="a", incarnation=1, rank=RANK, **asdict(report))
    book = TrainerBook("a", "e", 1, 2)
    book.take(emitted)
    with pytest.raises(ProtocolError, match="trainer rank 3 emitted 3 pieces with 36 elements .* plan has 3 pieces"):
        book.manifest(plan(), 1, 1, 0, 1)


def test_a_withdrawn_version_stops_and_the_next_attempt_goes_out_whole() -> None:
    lane, live = FakeLane(open_gate=False), buffers()
    pieces = (*many(6), piece(6, 0, "two", rows((24,), 0, (1,))))
    with emitter({0: lane}, plan=plan(pieces), buffers=live, slots=2) as emit:
        emit.begin(1, 0)
        emit.final("one")  # one piece on the lane, one packed, four wait for slots; `two` is never final
        eventually(lambda: lane.asked == 1)
        threading.Timer(0.1, lane.gate.set).start()
        emit.revoke()
        wasted = emit.drain()
        assert (wasted.version, wasted.attempt, wasted.pieces, wasted.elements) == (1, 0, 1, 4)
        assert emit.is_packed_within(0.1)
        live["one"].fill_(-1)
        emit.begin(1, 1)
        emit.final("one")
        emit.final("two")
        report = emit.drain()
    assert [(header.attempt, header.seq) for header, _ in lane.sent] == [(0, 0), *((1, seq) for seq in range(7))]
    assert torch.equal(lane.sent[1][1].view(torch.float32), torch.full((4,), -1.0))
    assert (report.pieces, report.elements) == (7, 48)


def test_revoking_ends_leases_at_once_and_the_next_version_waits_for_the_lane() -> None:
    """The engine takes nothing: weights may change all the same, and only what is on the lane still arrives."""
    lane, live = FakeLane(open_gate=False), buffers()
    with emitter({0: lane}, plan=plan(many(6)), buffers=live, slots=2) as emit:
        emit.begin(1, 0)
        emit.final("one")
        eventually(lambda: lane.asked == 1)
        assert not emit.is_packed_within(0.1)
        emit.revoke()
        assert emit.is_packed_within(0.0)
        live["one"].fill_(-1)
        with pytest.raises(EmitError, match="version 1 still has"):
            emit.begin(2, 0)
        lane.gate.set()
        report = emit.drain()
        assert (report.withdrawn, report.pieces, report.elements) == (True, 1, 4)
        emit.begin(2, 0)
        emit.final("one")
        report = emit.drain()
        assert (report.withdrawn, report.pieces) == (False, 6)
    assert [(header.version, header.seq) for header, _ in lane.sent] == [(1, 0), *((2, seq) for seq in range(6))]
    assert torch.equal(lane.sent[0][1].view(torch.float32), torch.arange(4.0))


def test_slots_for_everything_end_every_lease_though_nothing_arrives() -> None:
    lane = FakeLane(open_gate=False)
    with emitter({0: lane}, plan=plan(many(6)), slots=1000) as emit:
        emit.begin(1, 0)
        emit.final("one")
        assert emit.is_packed_within(2.0) and lane.sent == []
        assert len(emit._slots._free[0]) == 0, "as many slots as pieces, and no more"


def test_a_withdrawn_piece_that_stays_on_its_lane_ends_at_the_deadline() -> None:
    lane = FakeLane(open_gate=False)
    with emitter({0: lane}, plan=plan(many(2))) as emit:
        emit.begin(1, 0)
        emit.final("one")
        eventually(lambda: lane.asked == 1)
        emit.revoke()
        with pytest.raises(EmitError, match=r"drain of version 1 stood for 0.2 s; .*not acknowledged: rank 0: [12]"):
            emit.drain(0.2)
