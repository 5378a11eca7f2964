"""The staging table: what is taken, what is refused by name, what is complete, and random orders of all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megastream.protocol.staging import Key, PieceRefused, StagingTable, Verdict
from megastream.protocol.terms import Terms
from tests.helpers.plans import TERMS, header_of, small_plan

PLAN = small_plan()
MINE = PLAN.by_target[0]


def table(num_sets: int = 2) -> StagingTable:
    return StagingTable(TERMS, PLAN, 0, num_sets)


def put(staging: StagingTable, version: int, attempt: int = 0, pieces: Any = MINE) -> None:
    for piece in pieces:
        header = header_of(piece, version, attempt)
        assert staging.admit(header, piece.source).verdict is Verdict.TAKE
        staging.arrived(header)


def test_a_version_is_sealed_by_its_elements_and_not_before() -> None:
    staging = table()
    put(staging, 0, pieces=MINE[:-1])
    assert not staging.is_sealed(Key(1, 0, 0))
    header = header_of(MINE[-1], 0)
    assert staging.admit(header, MINE[-1].source).verdict is Verdict.TAKE
    assert not staging.is_sealed(Key(1, 0, 0)), "admitted is not arrived"
    progress = staging.arrived(header)
    assert progress.unit and progress.rank and staging.is_sealed(Key(1, 0, 0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", "another run"),
        ("incarnation", 2),
        ("attachment", "i2"),
        ("plan_digest", "other"),
        ("encoding", "delta"),
        ("base_version", 3),
        ("namespace", "lora"),
        ("kind", "close"),
        ("target", 1),
        ("source", 1),
        ("unit", "s9.norm"),
        ("num_bytes", 7),
        ("seq", 10_000),
        ("version", -1),
    ],
)
def test_a_foreign_piece_is_refused_by_name(field: str, value: Any) -> None:
    header = msgspec.structs.replace(header_of(MINE[0], 0), **{field: value})
    with pytest.raises(PieceRefused, match=f"engine rank 0 refused.*{field.split('_')[0]}.*{value}"):
        table().admit(header, 0)


def test_payload_that_is_labelled_as_another_piece_is_refused() -> None:
    """Metadata and payload in different order: the header names a piece of another size or another lane."""
    header = msgspec.structs.replace(header_of(MINE[0], 0), seq=MINE[1].seq)
    with pytest.raises(PieceRefused, match="unit is .* planned"):
        table().admit(header, 0)


def test_a_duplicate_is_refused_also_after_a_loss() -> None:
    staging = table()
    put(staging, 0, pieces=MINE[:1])
    with pytest.raises(PieceRefused, match="duplicate"):
        staging.admit(header_of(MINE[0], 0), 0)
    lost = header_of(MINE[1], 0)
    staging.admit(lost, 0)
    staging.lost(lost)
    with pytest.raises(PieceRefused, match="duplicate"):
        staging.admit(lost, 0)
    put(staging, 0, attempt=1)
    assert staging.is_sealed(Key(1, 0, 1)) and staging.staged == (Key(1, 0, 1),)


def test_a_withdrawn_attempt_is_dropped_and_an_accepted_one_is_not_withdrawn() -> None:
    staging = table()
    put(staging, 1)
    staging.accepted(1, 0)
    with pytest.raises(PieceRefused, match="attempt 0 of version 1 is already accepted"):
        staging.admit(header_of(MINE[0], 1, 1), 0)
    put(staging, 2, attempt=1, pieces=MINE[:1])
    assert staging.admit(header_of(MINE[0], 2, 0), 0).verdict is Verdict.DROP


def test_a_slot_is_not_given_away_while_somebody_writes_or_reads_it() -> None:
    staging = table(num_sets=1)
    writing = header_of(MINE[0], 1)
    slot = staging.admit(writing, 0).slot
    newer = header_of(MINE[0], 1, attempt=1)
    assert staging.admit(newer, 0).verdict is Verdict.WAIT and staging.slot_of(Key(1, 1, 0)) == slot
    assert not staging.arrived(writing).unit
    put(staging, 1, attempt=1)
    assert staging.hold(Key(1, 1, 1))
    staging.committed(1)
    assert staging.admit(header_of(MINE[0], 2), 0).verdict is Verdict.WAIT
    staging.release(Key(1, 1, 1))
    assert staging.admit(header_of(MINE[0], 2), 0).verdict is Verdict.TAKE


def test_the_end_keeps_complete_versions_only() -> None:
    staging = table()
    put(staging, 1)
    put(staging, 2, pieces=MINE[:1])
    staging.end()
    assert staging.staged == (Key(1, 1, 0),)
    with pytest.raises(PieceRefused, match="i1 has ended"):
        staging.admit(header_of(MINE[1], 2), 0)


class StagingMachine(RuleBasedStateMachine):
    """Lanes are ordered, their pieces interleave at random; attempts are withdrawn, pieces are lost or come twice,
    versions are committed, the trainer restarts as a new incarnation."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.taken: list[Any] = []
        self.start(TERMS)

    def start(self, terms: Terms) -> None:
        self.terms = terms
        self.staging = StagingTable(terms, PLAN, 0, num_sets=2)
        self.lanes: dict[int, list[Any]] = {0: [], 1: []}
        self.writing: list[Any] = []
        self.arrived: dict[Key, set[int]] = {}
        self.attempt, self.live = 0, terms.base_version - 1

    @rule(withdraw=st.booleans())
    def emit(self, withdraw: bool) -> None:
        """The trainer emits the next version, or withdraws what it emitted last and repeats it."""
        if withdraw and self.version > self.live + 1:
            self.attempt += 1
        else:
            self.version, self.attempt = self.version + 1, 0
        for source, lane in self.lanes.items():
            lane += [
                header_of(piece, self.version, self.attempt, self.terms) for piece in MINE if piece.source == source
            ]

    @precondition(lambda self: any(self.lanes.values()))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from([source for source, lane in self.lanes.items() if lane]))
        header = self.lanes[source][0]
        admission = self.staging.admit(header, source)
        if admission.verdict is Verdict.WAIT:
            assert not self.staging.free_slots
            return
        self.lanes[source].pop(0)
        if admission.verdict is Verdict.TAKE:
            self.writing.append((header, admission.slot))
            self.taken.append(header)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        """A piece that was taken once, in this incarnation or before, is never taken again."""
        header = data.draw(st.sampled_from(self.taken))
        try:
            assert self.staging.admit(header, header.source).verdict is Verdict.DROP
        except PieceRefused as refusal:
            old = header.incarnation != self.terms.incarnation
            assert ("incarnation is" if old else "duplicate") in str(refusal)

    @rule(chance=st.integers(0, 9))
    def restart(self, chance: int) -> None:
        if chance == 0:
            self.version += 1
            incarnation = self.terms.incarnation + 1
            self.start(replace(self.terms, incarnation=incarnation, base_version=self.version))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), lose=st.integers(0, 9))
    def land(self, data: st.DataObject, lose: int) -> None:
        header, slot = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        key = Key(header.incarnation, header.version, header.attempt)
        assert self.staging.slot_of(key) == slot, "a slot was given away while it was being written"
        if lose == 0:
            self.staging.lost(header)
            return
        was_there = key in self.staging.staged
        progress = self.staging.arrived(header)
        if was_there:
            self.arrived.setdefault(key, set()).add(header.seq)
            assert progress.rank == (self.arrived[key] == {piece.seq for piece in MINE})

    @precondition(lambda self: any(self.staging.is_sealed(key) for key in self.staging.staged))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        sealed = [key for key in self.staging.staged if self.staging.is_sealed(key)]
        self.live = data.draw(st.sampled_from(sealed)).version
        self.staging.committed(self.live)

    @invariant()
    def nothing_stale_and_no_slot_twice(self) -> None:
        staged = self.staging.staged
        assert all(key.version > self.live for key in staged)
        assert len({key.version for key in staged}) == len(staged), "two attempts of one version"
        slots = [self.staging.slot_of(key) for key in staged] + list(self.staging.free_slots)
        assert len(slots) == len(set(slots)) <= 2

    @invariant()
    def sealed_means_everything_arrived(self) -> None:
        for key in self.staging.staged:
            everything = self.arrived.get(key, set()) == {piece.seq for piece in MINE}
            assert self.staging.is_sealed(key) == everything


TestStagingMachine = StagingMachine.TestCase
TestStagingMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_was_withdrawn_for_good_leaves_room_and_does_not_come_back() -> None:
    staging = table(num_sets=1)
    put(staging, 1, pieces=MINE[:2])
    assert staging.admit(header_of(MINE[0], 2), MINE[0].source).verdict is Verdict.WAIT
    staging.accepted(1, 0)
    staging.withdrawn(1, 0)
    late = MINE[2]
    assert staging.admit(header_of(late, 1), late.source).verdict is Verdict.DROP, "its lane was slower than the log"
    put(staging, 2)
    assert staging.staged == (Key(1, 2, 0),) and staging.is_sealed(Key(1, 2, 0))
