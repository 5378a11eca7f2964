"""A state machine for newest wins, over staging and commit tables together: random arrival orders, duplicates, losses,
withdrawn pieces, failed commits, gates, late manifests, restarts. What a commit writes is simulated piece by piece, so
the truth about live units never comes from the tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megastream.protocol.commit import CommitTable
from megastream.protocol.header import PieceHeader
from megastream.protocol.part_records import UnitsSealed
from megastream.protocol.records import Accepted, Sealed, WeightsReady
from megastream.protocol.staging import Key, PieceRefused, StagingTable, Verdict
from tests.helpers.plans import PARTS, TERMS, header_of, plan_of_parts

PLAN = plan_of_parts()
RANKS, SETS = 2, 2
LANES = sorted({(piece.source, piece.target) for piece in PLAN.pieces})
HELD = {rank: [unit for unit, ranks in PARTS.items() if rank in ranks] for rank in range(RANKS)}


class Rank:
    """One engine rank: its staging with what every slot holds, and its live units."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.live: dict[str, int | None] = dict.fromkeys(HELD[rank], 0)
        """None: a commit broke off, nobody knows."""
        self.slots: list[dict[int, Key]] = [{} for _ in range(SETS)]
        self.writing: list[tuple[PieceHeader, int]] = []

    def write(self, key: Key, units: tuple[str, ...] | None) -> None:
        """A commit: every piece of these units must lie in the version's slot."""
        slot = self.slots[self.staging.slot_of(key)]
        for unit in HELD[self.rank] if units is None else units:
            if unit in self.live:
                pieces = [p.seq for p in PLAN.by_target[self.rank] if p.unit == unit]
                assert [slot.get(seq) for seq in pieces] == [key] * len(pieces), "staging holds something else"
                self.live[unit] = key.version


class NewestWins(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranks = [Rank(rank) for rank in range(RANKS)]
        self.version, self.attempt = 0, 0
        self.taken: list[PieceHeader] = []
        self.sent: dict[int, int] = {}
        """Version -> the attempt that was accepted."""
        self.begin(TERMS)

    def begin(self, terms: Any) -> None:
        """An attachment in force at its base version."""
        self.terms = terms
        self.table = CommitTable(terms, RANKS, PARTS)
        self.table.skip_to(terms.base_version)
        self.lanes: dict[tuple[int, int], list[PieceHeader]] = {lane: [] for lane in LANES}
        self.records: list[Any] = []
        self.units: set[tuple[int, Key, str]] = set()
        self.ended = False
        for rank in self.ranks:
            rank.writing.clear()
            rank.staging = StagingTable(terms, PLAN, rank.rank, SETS)
            rank.staging.committed(terms.base_version)
            rank.live = dict.fromkeys(rank.live, terms.base_version)

    # ---- the trainer

    @precondition(lambda self: not self.ended and sum(map(len, self.lanes.values())) < 2 * len(PLAN.pieces))
    @rule(accept=st.booleans())
    def emit(self, accept: bool) -> None:
        """The next version, or the last one once more when nobody has accepted it: what was sent of it is withdrawn."""
        undecided = self.version > self.terms.base_version and self.version not in self.sent
        self.version, self.attempt = (self.version, self.attempt + 1) if undecided else (self.version + 1, 0)
        for piece in PLAN.pieces:
            header = header_of(piece, self.version, self.attempt, self.terms)
            self.lanes[piece.source, piece.target].append(header)
        if accept:
            self.accept()

    @precondition(lambda self: not self.ended and self.version > self.terms.base_version)
    @rule()
    def accept(self) -> None:
        """What was emitted last counts. Its manifest follows, perhaps long after."""
        if self.version in self.sent:
            return
        self.sent[self.version] = self.attempt
        name = {"attachment": "i1", **Key(self.terms.incarnation, self.version, self.attempt)._asdict()}
        self.records.append(Accepted(**name, train_step=0))
        elements = sum(PLAN.elements.values())
        self.records.append(WeightsReady(**name, train_step=0, plan_digest="digest", units=(), elements=elements))
        for rank in self.ranks:
            rank.staging.accepted(self.version, self.attempt)

    # ---- lanes

    @precondition(lambda self: not self.ended and any(self.lanes.values()))
    @rule(data=st.data(), count=st.integers(1, 6))
    def deliver(self, data: st.DataObject, count: int) -> None:
        """Lanes are ordered, and each is as fast as it likes."""
        lane = data.draw(st.sampled_from([lane for lane, queue in self.lanes.items() if queue]))
        while count and self.lanes[lane] and self.take_from(lane):
            count -= 1

    def take_from(self, lane: tuple[int, int]) -> bool:
        """False when the piece has to wait for a slot."""
        header, rank = self.lanes[lane][0], self.ranks[lane[1]]
        admission = rank.staging.admit(header, lane[0])
        if admission.verdict is Verdict.WAIT:
            assert not rank.staging.free_slots
            return False
        self.lanes[lane].pop(0)
        if admission.verdict is Verdict.TAKE:
            rank.writing.append((header, admission.slot))
            self.taken.append(header)
        return True

    @precondition(lambda self: not self.ended)
    @rule(sources=st.sampled_from([(0,), (1,), (0, 1)]))
    def rush(self, sources: tuple[int, ...]) -> None:
        """All that these trainer ranks have sent arrives, and what the ranks say of it is heard."""
        self.arrive([lane for lane in LANES if lane[0] in sources])

    def arrive(self, lanes: list[tuple[int, int]]) -> None:
        for lane in lanes:
            while self.lanes[lane] and self.take_from(lane):
                pass
        for rank in self.ranks:
            while rank.writing:
                self.put(rank, *rank.writing.pop())
        while self.records:
            self.tell(self.records.pop())

    @precondition(lambda self: not self.ended and self.taken)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        header = data.draw(st.sampled_from(self.taken))
        try:
            verdict = self.ranks[header.target].staging.admit(header, header.source).verdict
        except PieceRefused:
            return
        assert verdict is Verdict.DROP, "a piece was taken twice"

    @precondition(lambda self: any(rank.writing for rank in self.ranks))
    @rule(data=st.data(), count=st.integers(1, 12), lose=st.sampled_from([False] * 7 + [True]))
    def land(self, data: st.DataObject, count: int, lose: bool) -> None:
        rank = data.draw(st.sampled_from([rank for rank in self.ranks if rank.writing]))
        while count and rank.writing:
            header, slot = rank.writing.pop(data.draw(st.integers(0, len(rank.writing) - 1)))
            count -= 1
            if lose:
                rank.staging.lost(header)
                self.end()
                return
            self.put(rank, header, slot)

    def put(self, rank: Rank, header: PieceHeader, slot: int) -> None:
        key = Key(header.incarnation, header.version, header.attempt)
        assert rank.staging.slot_of(key) == slot, "a slot was given away while it was being written"
        rank.slots[slot][header.seq] = key
        progress = rank.staging.arrived(header)
        name = {"attachment": "i1", "rank": rank.rank, "plan_digest": "digest", **key._asdict()}
        if progress.unit:
            rank.staging.stay(key)
            self.records.append(UnitsSealed(**name, units=(header.unit,)))
        if progress.rank:
            elements = sum(n for (_, target), n in PLAN.elements.items() if target == rank.rank)
            self.records.append(Sealed(**name, elements=elements, prepare_s=0.0))

    def end(self) -> None:
        """A lane broke: the attachment ends, but a commit that is under way still happens."""
        self.ended = True
        self.table.close()
        for rank in self.ranks:
            rank.staging.end()

    @precondition(lambda self: self.ended and self.table.in_flight is None)
    @rule()
    def restart(self) -> None:
        """A new incarnation numbers above everything and brings its base version whole."""
        self.version, self.attempt = self.version + 1, 0
        self.begin(replace(self.terms, incarnation=self.terms.incarnation + 1, base_version=self.version))

    # ---- the coordinator

    @precondition(lambda self: not self.ended and self.records)
    @rule(data=st.data(), count=st.integers(1, 9))
    def hear(self, data: st.DataObject, count: int) -> None:
        while count and self.records:
            self.tell(self.records.pop(data.draw(st.integers(0, len(self.records) - 1))))
            count -= 1

    def tell(self, record: Any) -> None:
        table = self.table
        take = {Sealed: table.sealed, UnitsSealed: table.units_sealed, Accepted: table.accepted}
        take.get(type(record), table.manifest)(record)

    @precondition(lambda self: self.table.next_early() is not None)
    @rule(data=st.data())
    def start_part(self, data: st.DataObject) -> None:
        """Any gate: some of the units that may become live early, but never the last ones."""
        key, units = self.table.next_early()
        ahead = self.table.mix.ahead if self.table.mix else ()
        most = len(PARTS) - 1 - len(ahead)
        if most:
            part = data.draw(st.lists(st.sampled_from(sorted(units)), min_size=1, max_size=most, unique=True))
            self.begin_commit(key, tuple(part))

    @precondition(lambda self: self.table.next_commit() is not None)
    @rule()
    def start_whole(self) -> None:
        key = self.table.next_commit()
        ready = [number for number in range(self.version + 1) if self.table.is_ready(number)]
        assert key.version == max(ready), "the newest ready version is next"
        self.begin_commit(key, ())

    def begin_commit(self, key: Key, part: tuple[str, ...]) -> None:
        assert self.sent[key.version] == key.attempt, "only what was accepted becomes visible"
        self.part, self.key = part, key
        self.units_to_write = self.table.start(key, part)
        assert self.table.next_commit() is None and self.table.next_early() is None, "one commit at a time"

    @precondition(lambda self: self.table.in_flight is not None)
    @rule(fails=st.sampled_from([False] * 5 + [True]), data=st.data())
    def finish(self, fails: bool, data: st.DataObject) -> None:
        broken = data.draw(st.sampled_from(self.ranks)) if fails else None
        for rank in self.ranks:
            before = dict(rank.live)
            rank.write(self.key, self.units_to_write)
            if rank is broken:
                rank.live = {unit: now if now == before[unit] else None for unit, now in rank.live.items()}
            if not self.part:
                rank.staging.committed(self.key.version)
        self.table.finish(ok=broken is None)

    @precondition(lambda self: self.table.mix is not None)
    @rule()
    def manifest_is_late(self) -> None:
        self.table.whole_next = True
        assert self.table.next_early() is None

    @invariant()
    def live_units_are_what_the_tokens_say(self) -> None:
        if self.table.poisoned or self.table.in_flight is not None:
            return
        said = self.table.mix.vector() if self.table.mix else dict.fromkeys(PARTS, self.table.live)
        for rank in self.ranks:
            assert rank.live == {unit: said[unit] for unit in rank.live}
        assert len(set(said.values())) <= 2 and min(said.values()) == self.table.live

    @invariant()
    def never_backwards(self) -> None:
        for rank in self.ranks:
            known = {unit: version for unit, version in rank.live.items() if version is not None}
            highest = getattr(rank, "highest", {})
            assert all(version >= highest.get(unit, 0) for unit, version in known.items())
            rank.highest = {**highest, **known}

    @invariant()
    def staging_is_given_back(self) -> None:
        for rank in self.ranks:
            staged = rank.staging.staged
            assert all(key.version > self.table.live for key in staged if self.table.in_flight is None)
            slots = [rank.staging.slot_of(key) for key in staged] + list(rank.staging.free_slots)
            assert len(slots) == len(set(slots)) <= SETS

    def teardown(self) -> None:
        """Whatever happened: once one more version is let through, it is live everywhere and all staging is free."""
        if self.table.in_flight is not None:
            self.finish_well()
        if self.ended:
            return
        if self.version > self.terms.base_version:
            self.accept()
        self.emit(accept=True)
        for _ in range(50):
            if self.table.live == self.version:
                break
            self.step_on()
        assert self.table.live == self.version and self.table.mix is None and not self.table.poisoned
        assert all(version == self.version for rank in self.ranks for version in rank.live.values())
        assert all(len(rank.staging.free_slots) == SETS for rank in self.ranks)

    def step_on(self) -> None:
        self.arrive(LANES)
        if (key := self.table.next_commit()) is not None:
            self.begin_commit(key, ())
            self.finish_well()

    def finish_well(self) -> None:
        for rank in self.ranks:
            rank.write(self.key, self.units_to_write)
            if not self.part:
                rank.staging.committed(self.key.version)
        self.table.finish(ok=True)
