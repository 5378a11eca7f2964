"""The commit table: what a version needs, newest wins, one at a time, never backwards; and random orders of records."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megastream.protocol.book import TrainerBook
from megastream.protocol.commit import CommitTable
from megastream.protocol.records import Accepted, Attach, Bound, Emitted, Sealed, WeightsReady
from megastream.protocol.staging import Key
from megastream.protocol.terms import ProtocolError, refuse_reserved
from tests.helpers.plans import TERMS, small_plan

RANKS = 2


def sealed(version: int, rank: int, attempt: int = 0, **changes: Any) -> Sealed:
    fields = dict(attachment="i1", incarnation=1, plan_digest="digest", elements=5, prepare_s=0.0)
    return Sealed(version=version, rank=rank, attempt=attempt, **{**fields, **changes})


def accepted(version: int, attempt: int = 0) -> Accepted:
    return Accepted(attachment="i1", incarnation=1, version=version, attempt=attempt, train_step=version)


def manifest(version: int, attempt: int = 0, **changes: Any) -> WeightsReady:
    fields = dict(attachment="i1", incarnation=1, train_step=0, plan_digest="digest", units=(), elements=10)
    return WeightsReady(version=version, attempt=attempt, **{**fields, **changes})


def table() -> CommitTable:
    return CommitTable(TERMS, RANKS)


def complete(commits: CommitTable, version: int) -> None:
    for rank in range(RANKS):
        commits.sealed(sealed(version, rank))
    commits.accepted(accepted(version))
    commits.manifest(manifest(version))


@pytest.mark.parametrize("missing", ["rank 0", "rank 1", "accepted", "manifest", "other attempt", "its manifest"])
def test_a_version_needs_every_rank_the_decision_and_the_manifest(missing: str) -> None:
    commits = table()
    for rank in range(RANKS):
        if missing != f"rank {rank}":
            commits.sealed(sealed(0, rank, attempt=int(missing == "other attempt")))
    if missing != "accepted":
        commits.accepted(accepted(0))
    if missing != "manifest":
        commits.manifest(manifest(0, attempt=int(missing == "its manifest")))
    assert commits.next_commit() is None
    complete(commits, 0)
    assert commits.next_commit() == Key(1, 0, 0)


def test_newest_wins_one_at_a_time_and_never_backwards() -> None:
    commits = table()
    complete(commits, 0)
    commits.start(Key(1, 0, 0))
    complete(commits, 1)
    complete(commits, 2)
    assert commits.next_commit() is None, "one commit is under way"
    assert commits.finish(ok=True) == ()
    assert commits.next_commit() == Key(1, 2, 0)
    commits.start(Key(1, 2, 0))
    assert commits.finish(ok=True) == (1,), "version 1 was overtaken as a whole"
    complete(commits, 1)
    assert commits.next_commit() is None
    with pytest.raises(ProtocolError, match="live version 2"):
        commits.start(Key(1, 1, 0))


def test_an_unaccepted_version_overtakes_nothing() -> None:
    commits = table()
    complete(commits, 0)
    for rank in range(RANKS):
        commits.sealed(sealed(1, rank))
    commits.manifest(manifest(1))
    assert commits.next_commit() == Key(1, 0, 0)


def test_a_failed_commit_poisons_until_a_later_version_is_live() -> None:
    commits = table()
    complete(commits, 0)
    commits.start(Key(1, 0, 0))
    commits.finish(ok=False)
    assert commits.poisoned and commits.next_commit() is None, "the same version is not tried for ever"
    complete(commits, 1)
    commits.start(Key(1, 1, 0))
    commits.finish(ok=True)
    assert not commits.poisoned


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (sealed(0, 0, plan_digest="other"), "engine rank 0 sealed version 0 under plan other, agreed was digest"),
        (manifest(0, plan_digest="other"), "the manifest of version 0 under plan other"),
        (sealed(0, 7), "engine rank 7.* 2 ranks"),
        (sealed(0, 0, incarnation=3), "version 0 of incarnation 3 .* incarnation 1"),
    ],
)
def test_contradictions_are_named(record: Any, words: str) -> None:
    commits = table()
    with pytest.raises(ProtocolError, match=words):
        commits.sealed(record) if isinstance(record, Sealed) else commits.manifest(record)


def test_a_version_that_is_accepted_twice_or_sealed_short_is_named() -> None:
    commits = table()
    commits.accepted(accepted(0))
    with pytest.raises(ProtocolError, match="attempt 0 and as attempt 1"):
        commits.accepted(accepted(0, attempt=1))
    commits.manifest(manifest(1, elements=11))
    commits.sealed(sealed(1, 0))
    with pytest.raises(ProtocolError, match="10 elements sealed, its manifest says 11"):
        commits.sealed(sealed(1, 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("membership_epoch", 1),
        ("namespace", "lora"),
        ("encoding", "delta"),
        ("transfer", "pull"),
        ("replicas", ("e2",)),
        ("commit_step", 5),
    ],
)
def test_what_is_reserved_for_later_is_refused_by_name(field: str, value: Any) -> None:
    attach = Attach(
        attachment="i1",
        incarnation=1,
        engine="e",
        kind="stream",
        family="qwen3_moe",
        base_version=0,
        trainer_world_size=2,
        finality="pipelined",
        piece_bytes=1,
        experts_per_unit=1,
        train_step=0,
    )
    refuse_reserved(attach)
    with pytest.raises(ProtocolError, match=f"{field}=.* is not supported"):
        refuse_reserved(msgspec.structs.replace(attach, **{field: value}))


def test_no_manifest_for_a_version_that_was_not_emitted_as_planned() -> None:
    plan = small_plan()
    book = TrainerBook("i1", "e", trainer_ranks=2, engine_ranks=2)

    def emit(rank: int, pieces: int, elements: int) -> None:
        sizes = dict(pieces=pieces, elements=elements, payload_bytes=2 * elements, wire_bytes=0, wait_s=0.0)
        book.take(Emitted(attachment="i1", incarnation=1, version=1, attempt=0, rank=rank, **sizes))

    assert book.not_emitted(1, 0) == ["trainer rank 0", "trainer rank 1"]
    emit(0, 4, 6)
    emit(1, 4, 6)
    assert book.manifest(plan, 1, 1, 0, train_step=9).elements == 12
    emit(0, 4, 6)
    emit(1, 0, 0)
    with pytest.raises(ProtocolError, match="rank 1 emitted 0 pieces with 0 elements in 0 bytes, the plan has 4"):
        book.manifest(plan, 1, 1, 0, train_step=9)


def test_plans_that_differ_are_named_by_two_ranks() -> None:
    book = TrainerBook("i1", "e", trainer_ranks=1, engine_ranks=1)
    book.take(Bound(attachment="i1", side="engine", rank=0, digest="a"))
    assert book.not_bound() == ["trainer rank 0"]
    book.take(Bound(attachment="i1", side="trainer", rank=0, digest="b"))
    with pytest.raises(ProtocolError, match="engine rank 0 built a, trainer rank 0 built b"):
        book.agreed_digest()


class CommitMachine(RuleBasedStateMachine):
    """Records of several versions and attempts in any order; commits succeed and fail."""

    def __init__(self) -> None:
        super().__init__()
        self.commits = table()
        self.pool: list[Any] = []
        self.taken: list[Any] = []
        self.next_version, self.live = 0, -1
        self.decided: dict[int, int] = {}

    @rule(attempts=st.integers(1, 2), manifested=st.integers(0, 4))
    def emit(self, attempts: int, manifested: int) -> None:
        version = self.next_version
        self.next_version += 1
        for attempt in range(attempts):
            self.pool += [sealed(version, rank, attempt) for rank in range(RANKS)]
        self.decided[version] = attempts - 1
        self.pool.append(accepted(version, attempts - 1))
        if manifested:
            self.pool.append(manifest(version, attempts - 1))

    @precondition(lambda self: self.pool)
    @rule(data=st.data(), keep=st.integers(0, 9))
    def deliver(self, data: st.DataObject, keep: int) -> None:
        record = self.pool.pop(data.draw(st.integers(0, len(self.pool) - 1)))
        if keep == 0:
            return  # lost
        self.taken.append(record)
        take = {Sealed: self.commits.sealed, Accepted: self.commits.accepted, WeightsReady: self.commits.manifest}
        take[type(record)](record)

    @rule(ok=st.booleans())
    def commit(self, ok: bool) -> None:
        key = self.commits.next_commit()
        if key is None:
            return
        assert key.version > self.live and key.attempt == self.decided[key.version]
        have = [record for record in self.taken if record.version == key.version]
        ranks = {r.rank for r in have if isinstance(r, Sealed) and r.attempt == key.attempt}
        assert ranks == set(range(RANKS))
        assert any(isinstance(r, Accepted) for r in have) and any(isinstance(r, WeightsReady) for r in have)
        self.commits.start(key)
        assert self.commits.next_commit() is None
        self.commits.finish(ok)
        assert self.commits.poisoned is not ok
        self.live = key.version

    @invariant()
    def the_newest_ready_version_is_next(self) -> None:
        ready = [v for v in range(self.live + 1, self.next_version) if self.commits.is_ready(v)]
        key = self.commits.next_commit()
        assert (key.version if key else None) == (max(ready) if ready else None)


TestCommitMachine = CommitMachine.TestCase
TestCommitMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
