"""The emitter over lanes that a test holds in its hand: order, bytes, slots, leases, errors, ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
import torch
import xxhash

from megastream.protocol.header import HEADER_BYTES, PieceHeader
from megastream.trainer.emit import Emitter
from megastream.trainer.outgoing import EmitError
from megastream.trainer.pack import Packer
from tests.helpers.emit import RANK, FakeLane, buffers, emitter, header_for, many, piece, plan, rows
from tests.helpers.spine import eventually


def test_pieces_go_out_in_plan_order_with_their_bytes() -> None:
    lanes = {0: FakeLane(), 1: FakeLane()}
    with emitter(lanes) as emit:
        emit.begin(7, 1)
        emit.final("two")
        emit.final("one")
        emit.final("a bucket without pieces")
        report = emit.drain()
    sent = {target: [header.seq for header, _ in lane.sent] for target, lane in lanes.items()}
    assert sent == {0: [2, 0], 1: [1]}
    expected = {
        0: torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]),
        1: torch.tensor([1.0, 2, 5, 6, 9, 10]),
        2: torch.arange(50.0, 74.0).bfloat16(),
    }
    for lane in lanes.values():
        for header, payload in lane.sent:
            assert torch.equal(payload.view(expected[header.seq].dtype), expected[header.seq])
            assert header.checksum == xxhash.xxh3_64_intdigest(payload.numpy())
            assert (header.version, header.attempt, header.num_bytes) == (7, 1, payload.numel())
    payload_bytes = 12 * 4 + 6 * 4 + 24 * 2
    assert (report.version, report.attempt, report.pieces, report.elements) == (7, 1, 3, 42)
    assert (report.payload_bytes, report.wire_bytes) == (payload_bytes, payload_bytes + 3 * HEADER_BYTES)


def test_reports_count_one_version_each() -> None:
    with emitter({0: FakeLane(), 1: FakeLane()}) as emit:
        reports = []
        for version in (1, 2):
            emit.begin(version, 1)
            emit.final("one")
            emit.final("two")
            reports.append(emit.drain())
    assert reports[0].wire_bytes == reports[1].wire_bytes
    assert [report.version for report in reports] == [1, 2]


def test_slots_bound_what_is_packed_and_hold_the_lease() -> None:
    lane, live = FakeLane(open_gate=False), buffers()
    with emitter({0: lane}, plan=plan(many(6)), buffers=live, slots=2) as emit:
        emit.begin(1, 1)
        emit.final("one")
        assert not emit.is_packed_within(0.2)
        with pytest.raises(EmitError, match=r"drain of version 1 stood for 0.1 s; packing one .*to engine rank 0"):
            emit.drain(0.1)
        with pytest.raises(EmitError, match=r"leased \['one'\]; .*rank 0: 0 of 2 free; .*not acknowledged: rank 0: 6"):
            emit.drain(0.1)
        lane.gate.set()
        assert emit.is_packed_within(5.0)
        live["one"].fill_(-1)  # what the next step does once the lease has ended
        report = emit.drain()
    assert torch.equal(torch.cat([payload.view(torch.float32) for _, payload in lane.sent]), torch.arange(24.0))
    assert report.wait_s > 0.2


class Read(dict[str, torch.Tensor]):
    """Buckets that remember which of them were asked for."""

    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        super().__init__(buffers)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.names.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("layers", [8, 64])
def test_memory_is_that_of_the_slots_however_large_the_model_is(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first bucket leaves before another one is touched."""
    honest, slots = Packer.new_slot, []

    def new_slot(self: Packer, num_bytes: int, *rest: Any) -> torch.Tensor:
        slots.append(num_bytes)
        return honest(self, num_bytes, *rest)

    monkeypatch.setattr(Packer, "new_slot", new_slot)
    names = [f"layer {number}" for number in range(layers)]
    live = Read({name: torch.arange(256.0) for name in names})
    lane, pieces = FakeLane(), tuple(piece(seq, 0, name, rows((256,), 0, (1,))) for seq, name in enumerate(names))
    with emitter({0: lane}, plan=plan(pieces), buffers=live, slots=2) as emit:
        emit.begin(1, 1)
        emit.final(names[0])
        eventually(lambda: len(lane.sent) == 1)
        assert live.names == {names[0]}
    assert slots == [1024, 1024]


def test_a_lease_ends_when_packed_not_when_sent() -> None:
    lane = FakeLane(open_gate=False)
    with emitter({0: lane}, plan=plan(many(2)), slots=2) as emit:
        emit.begin(1, 1)
        emit.final("one")
        assert emit.is_packed_within(2.0) and not emit.is_drained_within(0.0)
        assert lane.sent == []
        lane.gate.set()
        assert emit.is_drained_within(2.0) and len(lane.sent) == 2


def test_no_slot_until_the_deadline_is_an_error() -> None:
    with emitter({0: FakeLane(open_gate=False)}, plan=plan(many(6)), slots=1, deadline_s=0.2) as emit:
        emit.begin(1, 1)
        emit.final("one")
        with pytest.raises(EmitError, match="no slot came free within 0.2 s; .*raise transfer_s"):
            emit.is_packed_within(2.0)


CALLS = [
    lambda e: e.begin(2, 1),
    lambda e: e.is_packed_within(5.0),
    lambda e: e.is_drained_within(5.0),
    lambda e: e.drain(),
    lambda e: e.revoke(),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_refused_piece_reaches_every_waiting_call(call: Callable[[Emitter], Any]) -> None:
    with emitter({0: FakeLane(fail_at=3)}, plan=plan(many(6)), slots=1) as emit:
        emit.begin(1, 1)
        emit.final("one")
        with pytest.raises(EmitError, match="version 1 .*engine rank 0 refused piece 3: no room"):
            emit.drain()
        with pytest.raises(EmitError, match="refused piece 3"):
            call(emit)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("error", "words"), [(ValueError("no"), "no"), (ZeroDivisionError("no"), "its thread broke")])
def test_a_header_that_cannot_be_made_reaches_the_trainer(error: Exception, words: str) -> None:
    def no_header(*args: Any) -> PieceHeader:
        raise error

    emit = Emitter(plan(), RANK, buffers(), {0: FakeLane(), 1: FakeLane()}, no_header, slots_per_target=1, deadline_s=5)
    emit.begin(1, 1)
    emit.final("one")
    with pytest.raises(EmitError, match=words):
        emit.drain()
    emit.close()


def test_drain_names_the_bucket_that_never_became_final() -> None:
    with emitter({0: FakeLane(), 1: FakeLane()}) as emit:
        emit.begin(1, 1)
        emit.final("one")
        with pytest.raises(EmitError, match=r"not yet final \['two'\]"):
            emit.drain(0.2)


def test_calls_out_of_order_are_refused() -> None:
    with emitter({0: FakeLane(), 1: FakeLane()}) as emit:
        with pytest.raises(EmitError, match="one is final twice, or before begin"):
            emit.final("one")
        emit.begin(1, 1)
        emit.begin(2, 1)  # the step of version 1 was skipped: nothing of it is under way
        emit.final("one")
        with pytest.raises(EmitError, match="one is final twice"):
            emit.final("one")
        with pytest.raises(EmitError, match="version 2 still has"):
            emit.begin(3, 1)


def test_closing_does_not_wait_for_what_is_queued() -> None:
    lane = FakeLane(open_gate=False)
    with emitter({0: lane}, plan=plan(many(6)), slots=1) as emit:
        emit.begin(1, 1)
        emit.final("one")
        started = monotonic()
        threading.Timer(0.2, lane.gate.set).start()
        emit.close()
        assert monotonic() - started < 8, "the lane itself gives up after 10 s"
        with pytest.raises(EmitError, match="closed"):
            emit.drain()
    assert len(lane.sent) <= 2


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(EmitError, match="no lane to it"):
        Emitter(plan(), RANK, buffers(), {0: FakeLane()}, header_for, slots_per_target=1, deadline_s=1)  # type: ignore[dict-item]
    with pytest.raises(EmitError, match="sends two, which this rank does not hold"):
        Emitter(
            plan(),
            RANK,
            {"one": torch.zeros(24)},
            {0: FakeLane(), 1: FakeLane()},  # type: ignore[dict-item]
            header_for,
            slots_per_target=1,
            deadline_s=1,
        )


def test_a_rank_with_nothing_to_send_reports_zero() -> None:
    with emitter({}, plan=plan(())) as emit:
        emit.begin(1, 1)
        emit.final("one")
        assert emit.is_packed_within(0.0)
        assert emit.drain().wire_bytes == 0


def emit_into_a_full_window(emit: Emitter, lane: FakeLane) -> None:
    """Of five packed pieces the first is acknowledged; with it the lane takes as many as its window."""
    emit.begin(1, 1)
    emit.final("one")
    assert emit.is_packed_within(5.0)
    lane.one_more.release()
    eventually(lambda: lane.asked == 4)
    assert [header.seq for header, _ in lane.posted] == [1, 2, 3]


def test_as_many_pieces_are_under_way_as_the_lane_takes() -> None:
    lane = FakeLane(open_gate=False, window=3)
    with emitter({0: lane}, plan=plan(many(5)), slots=5) as emit:
        emit_into_a_full_window(emit, lane)
        lane.gate.set()
        report = emit.drain()
    assert [header.seq for header, _ in lane.sent] == list(range(5))
    assert torch.equal(torch.cat([payload.view(torch.float32) for _, payload in lane.sent]), torch.arange(20.0))
    assert (report.pieces, report.elements) == (5, 20)


def test_of_a_withdrawn_version_arrives_what_is_under_way() -> None:
    lane = FakeLane(open_gate=False, window=3)
    with emitter({0: lane}, plan=plan(many(5)), slots=5) as emit:
        emit_into_a_full_window(emit, lane)
        emit.revoke()
        lane.gate.set()
        report = emit.drain()
        assert (report.withdrawn, report.pieces) == (True, 4)
        assert [header.seq for header, _ in lane.sent] == [0, 1, 2, 3]
        emit.begin(1, 2)
        emit.final("one")
        assert emit.drain().pieces == 5, "all slots are there again"


def test_a_version_may_take_longer_than_the_deadline_while_its_pieces_are_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And whoever waits is told so. The clock is the test's: of ten seconds six pass with each piece."""
    ticks, passed_s = itertools.count(), [0.0]
    monkeypatch.setattr("megastream.trainer.emit.monotonic", lambda: passed_s[0] + next(ticks) * 1e-6)
    lane, told = FakeLane(open_gate=False), []

    def still() -> None:
        told.append(len(lane.sent))
        if len(told) < 4:
            passed_s[0] += 6.0
            lane.one_more.release()
        else:
            passed_s[0] += 11.0

    with emitter({0: lane}, plan=plan(many(6)), slots=8) as emit:
        emit.begin(1, 1)
        emit.final("one")
        threading.Timer(0.1, lane.one_more.release).start()
        with pytest.raises(EmitError, match="drain of version 1 stood for 10.0 s; .*not acknowledged: rank 0: 2"):
            emit.drain(10.0, 0.01, still)
        assert told == [1, 2, 3, 4]
        lane.gate.set()
        assert emit.drain().pieces == 6
