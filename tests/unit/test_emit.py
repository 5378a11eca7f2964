"""The emitter over lanes that a test holds in its hand: order, bytes, slots, leases, errors, ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import pytest
import torch
import xxhash

from megastream.plan.types import Copy, Piece, Plan
from megastream.protocol.header import HEADER_BYTES, PieceHeader
from megastream.protocol.lane import LaneCounters, LaneError
from megastream.trainer.emit import EmitError, Emitter

RANK = 3


class FakeLane:
    """Keeps what it is given. `gate` blocks sends until it is set; `fail_at` refuses the piece with that seq."""

    def __init__(self, *, open_gate: bool = True, fail_at: int | None = None) -> None:
        self.counters, self.sent, self.closed, self.fail_at = LaneCounters(), [], 0, fail_at
        self.gate = threading.Event()
        if open_gate:
            self.gate.set()

    def send(self, header: PieceHeader, payload: torch.Tensor, deadline_s: float) -> None:
        assert self.gate.wait(10)
        if header.seq == self.fail_at:
            raise LaneError(f"engine rank {header.target} refused piece {header.seq}: no room")
        assert payload.dtype == torch.uint8 and payload.dim() == 1 and payload.is_contiguous()
        self.counters.payload_bytes += payload.numel()
        self.counters.header_bytes += HEADER_BYTES
        self.sent.append((header, payload.clone()))

    def close(self) -> None:
        self.closed += 1


def piece(seq: int, target: int, buffer: str, *copies: Copy, dtype: str = "float32") -> Piece:
    elements = sum(torch.Size(copy.shape).numel() for copy in copies)
    size = elements * getattr(torch, dtype).itemsize
    transform = "none" if dtype == "float32" else "cast"
    return Piece(seq, RANK, target, buffer, "s0.l0.dense", dtype, transform, elements, size, copies)


def rows(shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Copy:
    return Copy("t", shape, offset, strides, "live", 0, strides)


def header_for(piece: Piece, version: int, attempt: int, checksum: int) -> PieceHeader:
    return PieceHeader(
        kind="piece",
        run_id="run",
        incarnation=1,
        attachment="a",
        version=version,
        attempt=attempt,
        unit=piece.unit,
        plan_digest="d",
        source=piece.source,
        target=piece.target,
        seq=piece.seq,
        num_bytes=piece.num_bytes,
        checksum=checksum,
    )


# Two buckets of 24 elements. Of `one`, rows go to engine rank 0 and a column block to 1; all of `two` goes to 0.
PIECES = (
    piece(0, 0, "one", rows((2, 4), 0, (4, 1)), rows((1, 4), 12, (4, 1))),
    piece(1, 1, "one", rows((3, 2), 1, (4, 1))),
    piece(2, 0, "two", rows((24,), 0, (1,)), dtype="bfloat16"),
)


def plan(pieces: tuple[Piece, ...] = PIECES) -> Plan:
    return Plan("d", "stream", 4, 2, pieces, ("s0.l0.dense",), {}, {}, {})


def buffers() -> dict[str, torch.Tensor]:
    # The second one starts in the middle of its storage, as a bucket does.
    return {"one": torch.arange(24.0), "two": torch.arange(100.0)[50:74]}


@contextmanager
def emitter(lanes: dict[int, FakeLane], **settings: Any) -> Iterator[Emitter]:
    made = Emitter(
        settings.pop("plan", plan()),
        RANK,
        settings.pop("buffers", buffers()),
        lanes,  # type: ignore[arg-type]
        header_for,
        slots_per_target=settings.pop("slots", 2),
        deadline_s=settings.pop("deadline_s", 5.0),
    )
    try:
        yield made
    finally:
        for lane in lanes.values():
            lane.gate.set()
        made.close()
        made.close()
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("emit-")] == []
        assert all(lane.closed for lane in lanes.values())


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


def many(count: int) -> tuple[Piece, ...]:
    return tuple(piece(seq, 0, "one", rows((4,), 4 * seq, (1,))) for seq in range(count))


def test_slots_bound_what_is_packed_and_hold_the_lease() -> None:
    lane, live = FakeLane(open_gate=False), buffers()
    with emitter({0: lane}, plan=plan(many(6)), buffers=live, slots=2) as emit:
        emit.begin(1, 1)
        emit.final("one")
        with pytest.raises(
            EmitError, match=r"wait_packed of version 1 took over 0.2 s; packing one .*to engine rank 0"
        ):
            emit.wait_packed(0.2)
        with pytest.raises(EmitError, match=r"leased \['one'\]; .*rank 0: 0 of 2 free; .*not acknowledged: rank 0: 6"):
            emit.drain(0.1)
        lane.gate.set()
        emit.wait_packed()
        live["one"].fill_(-1)  # what the next step does once the lease has ended
        report = emit.drain()
    assert torch.equal(torch.cat([payload.view(torch.float32) for _, payload in lane.sent]), torch.arange(24.0))
    assert report.wait_s > 0.2


def test_a_lease_ends_when_packed_not_when_sent() -> None:
    lane = FakeLane(open_gate=False)
    with emitter({0: lane}, plan=plan(many(2)), slots=2) as emit:
        emit.begin(1, 1)
        emit.final("one")
        emit.wait_packed(2.0)
        assert lane.sent == []


def test_no_slot_until_the_deadline_is_an_error() -> None:
    with emitter({0: FakeLane(open_gate=False)}, plan=plan(many(6)), slots=1, deadline_s=0.2) as emit:
        emit.begin(1, 1)
        emit.final("one")
        with pytest.raises(EmitError, match="no slot came free within 0.2 s"):
            emit.wait_packed(2.0)


@pytest.mark.parametrize("call", [lambda e: e.begin(2, 1), lambda e: e.wait_packed(), lambda e: e.drain()])
def test_a_refused_piece_reaches_every_waiting_call(call: Callable[[Emitter], Any]) -> None:
    with emitter({0: FakeLane(fail_at=3)}, plan=plan(many(6)), slots=1) as emit:
        emit.begin(1, 1)
        emit.final("one")
        with pytest.raises(EmitError, match="version 1 .*engine rank 0 refused piece 3: no room"):
            emit.drain()
        with pytest.raises(EmitError, match="refused piece 3"):
            call(emit)


def test_a_header_that_cannot_be_made_reaches_the_trainer() -> None:
    def no_header(*args: Any) -> PieceHeader:
        raise ZeroDivisionError("broken")

    emit = Emitter(plan(), RANK, buffers(), {0: FakeLane(), 1: FakeLane()}, no_header, slots_per_target=1, deadline_s=5)
    emit.begin(1, 1)
    emit.final("one")
    with pytest.raises(EmitError, match="broken"):
        emit.wait_packed()
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
        assert monotonic() - started < 2
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
        emit.wait_packed()
        assert emit.drain().wire_bytes == 0
