"""A state machine for newest wins, over staging and commit tables together: random arrival orders, duplicates, losses,
withdrawn pieces, versions that are skipped or taken back, failed commits, gates that change, late manifests, restarts.
What a commit writes is simulated piece by piece, so the truth about live units never comes from the tables."""

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
from megastream.protocol.step_records import Withdrawn
from tests.helpers.counted_rank import CUTS, LANES, PLAN, RANKS, SETS, CountedRank, key_of, manifest_of
from tests.helpers.plans import PARTS, TERMS, header_of


class NewestWins(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranks = [CountedRank(rank) for rank in range(RANKS)]
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
        self.unsettled: WeightsReady | None = None
        """The manifest that the version accepted last will have."""
        self.drops: list[Key] = []
        """Taken back by the trainer, as the coordinator knows; ranks forget them behind the commit under way."""
        self.ended = False
        for rank in self.ranks:
            rank.writing.clear()
            rank.staging = StagingTable(terms, PLAN, rank.rank, SETS)
            rank.staging.committed(terms.base_version)
            rank.live = dict.fromkeys(rank.live, terms.base_version)

    # ---- the trainer

    @property
    def is_undecided(self) -> bool:
        return self.version > self.terms.base_version and self.version not in self.sent

    @precondition(lambda self: not self.ended and sum(map(len, self.lanes.values())) < 2 * len(PLAN.pieces))
    @rule(accept=st.booleans())
    def emit(self, accept: bool) -> None:
        """The next version, or the last one once more when nobody has accepted it: what was sent of it is withdrawn."""
        if self.unsettled is not None:
            self.settle(back=False)
        again = self.is_undecided
        self.version, self.attempt = (self.version, self.attempt + 1) if again else (self.version + 1, 0)
        for piece in PLAN.pieces:
            header = header_of(piece, self.version, self.attempt, self.terms)
            self.lanes[piece.source, piece.target].append(header)
        if accept:
            self.accept()

    @precondition(lambda self: not self.ended and self.is_undecided)
    @rule()
    def accept(self) -> None:
        """What was emitted last counts. Its manifest follows before the next version, and is heard perhaps late."""
        self.sent[self.version] = self.attempt
        key = Key(self.terms.incarnation, self.version, self.attempt)
        self.records.append(Accepted(attachment="i1", train_step=0, **key._asdict()))
        self.unsettled = manifest_of(key)
        for rank in self.ranks:
            rank.staging.accepted(self.version, self.attempt)

    @precondition(lambda self: self.unsettled is not None)
    @rule(back=st.sampled_from([False, False, True]))
    def settle(self, back: bool) -> None:
        """All of the accepted version has left; or it was not packed when weights had to change, and is taken back."""
        manifest, self.unsettled = self.unsettled, None
        self.withdraw(manifest) if back else self.records.append(manifest)

    def withdraw(self, manifest: WeightsReady) -> None:
        """What has not left yet never does."""
        for lane, queue in self.lanes.items():
            self.lanes[lane] = [header for header in queue if header.version != manifest.version]
        self.records.append(Withdrawn(attachment="i1", **key_of(manifest)._asdict()))

    @precondition(lambda self: not self.ended and self.version in self.sent)
    @rule()
    def skip(self) -> None:
        """This engine was too slow for a version: it goes to others only."""
        self.version, self.attempt = self.version + 1, 0
        self.sent[self.version] = -1

    @rule(gate=st.sampled_from(sorted(CUTS)), first=st.booleans())
    def choose_gate(self, gate: str, first: bool) -> None:
        """Ranks hear of it one behind the other."""
        self.ranks[not first].gate = gate

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
            rank.take(header, admission.slot)
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
                self.records += rank.put(*rank.writing.pop())
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
            self.records += rank.put(header, slot)

    def end(self) -> None:
        """A lane broke: the attachment ends, but a commit that is under way still happens."""
        self.ended, self.unsettled = True, None
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
        take = {Sealed: self.table.sealed, UnitsSealed: self.table.units_sealed, Accepted: self.table.accepted}
        {**take, WeightsReady: self.table.manifest, Withdrawn: self.take_back}[type(record)](record)

    def take_back(self, record: Withdrawn) -> None:
        self.table.withdrawn(key_of(record))
        self.drops.append(key_of(record))
        self.drop_if_idle()

    def drop_if_idle(self) -> None:
        """An ordered call: it runs behind a commit that was enqueued before it."""
        if self.table.in_flight is None:
            for key in self.drops:
                for rank in self.ranks:
                    rank.staging.withdrawn(key.version, key.attempt)
            self.drops.clear()

    @precondition(lambda self: self.table.next_early() is not None)
    @rule(data=st.data(), cut=st.sampled_from(["stage", "units"]))
    def start_part(self, data: st.DataObject, cut: str) -> None:
        """Any gate: some of the units that may become live early, but never the last ones."""
        key, units = self.table.next_early()
        names = data.draw(st.lists(st.sampled_from(sorted({*map(CUTS[cut], units)})), min_size=1, unique=True))
        part = tuple(unit for unit in sorted(units) if CUTS[cut](unit) in names)
        if self.table.is_part(key, part):
            self.begin_commit(key, part)

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
        self.complete(data.draw(st.sampled_from(self.ranks)) if fails else None)

    def complete(self, broken: CountedRank | None = None) -> None:
        """The ranks carry the ordered commit out, and `broken` says that it could not."""
        for rank in self.ranks:
            before = dict(rank.live)
            rank.write(self.key, self.units_to_write)
            if rank is broken:
                rank.live = {unit: now if now == before[unit] else None for unit, now in rank.live.items()}
            if not self.part:
                rank.staging.committed(self.key.version)
        self.table.finish(ok=broken is None)
        self.drop_if_idle()

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
            rank.check_never_backwards()

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
            self.complete()
        if self.ended:
            return
        if self.is_undecided:
            self.accept()
        self.emit(accept=True)
        self.settle(back=False)
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
            self.complete()
