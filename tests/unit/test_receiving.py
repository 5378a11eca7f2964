"""How an engine rank receives from one lane: order, buffers, and what follows from a piece that fails."""

from __future__ import annotations

import msgspec
import pytest
import torch

from megastream.engine.receiving import Receiving
from megastream.engine.settings import EngineSettings
from megastream.protocol.header import PieceHeader
from megastream.protocol.lane import LaneCounters, LaneError
from megastream.protocol.staging import PieceRefused
from tests.helpers.emit import header_for, piece, rows

SETTINGS = EngineSettings(transfer_s=5, liveness_s=5)
BYTES = 16


def header(seq: int, version: int = 1, num_bytes: int = BYTES) -> PieceHeader:
    made = header_for(piece(seq, 0, "one", rows((4,), 0, (1,))), version, 0, 0)
    return msgspec.structs.replace(made, num_bytes=num_bytes)


class FakeLane:
    """Gives its headers, then says that the sender has closed. `events` is what lane and sink were asked to do.

    `wrong` has a bad checksum. `sparse`: each header comes when everything before it is acknowledged.
    """

    device, window = "cpu", 3

    def __init__(self, *headers: PieceHeader, wrong: int | None = None, sparse: bool = False) -> None:
        self.counters, self.wrong, self.sparse = LaneCounters(), wrong, sparse
        self.headers = list(headers)
        self.events: list[tuple[str, int]] = []
        self.buffers: list[int] = []
        self.answers: list[tuple[int, str | None]] = []

    def has_header(self) -> bool:
        return bool(self.headers) and not self.sparse

    def receive_header(self, deadline_s: float) -> PieceHeader | None:
        return self.headers.pop(0) if self.headers else None

    def begin_payload(self, header: PieceHeader, into: torch.Tensor, deadline_s: float) -> None:
        into.fill_(header.seq)
        self.buffers.append(into.data_ptr())
        self.events.append(("begin", header.seq))

    def finish_payload(self, header: PieceHeader, deadline_s: float) -> None:
        self.events.append(("finish", header.seq))
        if header.seq == self.wrong:
            raise LaneError(f"piece {header.seq}: checksum")

    def acknowledge(self, header: PieceHeader, error: str | None = None) -> None:
        self.answers.append((header.seq, error))

    def abort(self) -> None: ...

    def close(self) -> None: ...


class FakeSink:
    def __init__(self, lane: FakeLane, refused: int | None = None) -> None:
        self.events, self.refused = lane.events, refused

    def admit(self, header: PieceHeader, source: int) -> bool:
        if header.seq == self.refused:
            raise PieceRefused(f"piece {header.seq} is not planned")
        self.events.append(("admit", header.seq))
        return True

    def write(self, header: PieceHeader, payload: torch.Tensor) -> None:
        assert bool((payload[: header.num_bytes] == header.seq).all())
        self.events.append(("write", header.seq))

    def lost(self, header: PieceHeader) -> None:
        self.events.append(("lost", header.seq))

    def settle(self, header: PieceHeader) -> None:
        self.events.append(("settle", header.seq))


def receive(lane: FakeLane, refused: int | None = None) -> None:
    Receiving(lane, 3, BYTES, FakeSink(lane, refused), SETTINGS).run()


def of(lane: FakeLane, kind: str) -> list[int]:
    return [seq for what, seq in lane.events if what == kind]


def test_pieces_are_begun_ahead_and_settled_in_order_out_of_as_many_buffers_as_the_window() -> None:
    lane = FakeLane(*map(header, range(8)))
    receive(lane)
    steps = [event for event in lane.events if event[0] in ("begin", "finish")]
    assert steps[:5] == [("begin", 0), ("begin", 1), ("begin", 2), ("finish", 0), ("begin", 3)]
    assert lane.answers == [(seq, None) for seq in range(8)]
    assert of(lane, "write") == of(lane, "settle") == list(range(8))
    assert len(set(lane.buffers)) == lane.window


def test_nothing_waits_for_a_header_that_is_not_there() -> None:
    """And one buffer is enough for a sender that sends one by one."""
    lane = FakeLane(*map(header, range(3)), sparse=True)
    receive(lane)
    assert [seq for what, seq in lane.events if what in ("begin", "settle")] == [0, 0, 1, 1, 2, 2]
    assert len(set(lane.buffers)) == 1


def test_a_new_version_is_admitted_when_all_before_it_has_settled() -> None:
    """It may wait for room that only their version makes, once it is whole and live."""
    lane = FakeLane(header(0), header(1), header(0, version=2), header(1, version=2))
    receive(lane)
    before = lane.events.index(("admit", 0), 4)
    assert [event for event in lane.events[:before] if event[0] == "settle"] == [("settle", 0), ("settle", 1)]
    assert len(of(lane, "settle")) == 4


def test_a_wrong_checksum_is_answered_and_what_was_begun_behind_it_is_given_back() -> None:
    lane = FakeLane(*map(header, range(5)), wrong=1)
    with pytest.raises(LaneError, match="piece 1: checksum"):
        receive(lane)
    assert lane.answers == [(0, None), (1, "piece 1: checksum")]
    assert (of(lane, "settle"), of(lane, "lost")) == ([0], [1, 2, 3])


@pytest.mark.parametrize("num_bytes", [BYTES, BYTES + 1])
def test_a_refusal_is_answered_behind_the_pieces_before_it(num_bytes: int) -> None:
    """A payload that can be one of this lane's is taken off first."""
    lane = FakeLane(header(0), header(1), header(2, num_bytes=num_bytes), header(3))
    with pytest.raises(PieceRefused, match="piece 2 is not planned"):
        receive(lane, refused=2)
    assert lane.answers == [(0, None), (1, None), (2, "piece 2 is not planned")]
    assert of(lane, "begin") == ([0, 1, 2] if num_bytes == BYTES else [0, 1])
    assert (of(lane, "settle"), of(lane, "lost")) == ([0, 1], [])
