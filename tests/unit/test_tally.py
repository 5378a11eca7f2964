"""What is counted of one engine, from records as the log gives them."""

from __future__ import annotations

from typing import Any

from megastream.engine.tally import EngineTally, RankTally
from megastream.protocol.part_records import PartCommitted
from megastream.protocol.records import (
    Attached,
    Committed,
    Detached,
    Failed,
    RankCommit,
    Record,
    Sealed,
    WeightsReady,
)
from tests.helpers.plans import attach_record

NAME = {"attachment": "i1", "incarnation": 1}
REPLIES = (RankCommit(0, True, 0.25, 1), RankCommit(1, True, 0.5, 1))


def ready(version: int) -> WeightsReady:
    common: dict[str, Any] = {**NAME, "version": version, "attempt": 0}
    return WeightsReady(**common, train_step=0, plan_digest="d", units=(), elements=5)


def sealed(version: int, rank: int) -> Sealed:
    return Sealed(**NAME, version=version, attempt=0, rank=rank, plan_digest="d", elements=5, prepare_s=0.0)


def committed(version: int, **changes: Any) -> Committed:
    return Committed(**{**NAME, "version": version, "ranks": REPLIES, "visible_unix_s": 0.0, **changes})


def failed() -> Failed:
    return Failed(attachment="i1", side="core", rank=-1, reason="no")


ATTACHED = Attached(attachment="i1", engine="e", version=0, replaced=False)


def tally(*records: Record) -> EngineTally:
    counted = EngineTally("e", 2)
    for record in records:
        counted.take(record)
    return counted


def test_versions_and_stalls_are_counted_on_each_rank() -> None:
    part = PartCommitted(**NAME, version=2, units=("u",), label="1~2", ranks=REPLIES, visible_unix_s=0.0)
    counted = tally(attach_record(1, 0), ATTACHED, sealed(1, 0), sealed(1, 1), committed(1), part, sealed(2, 1))
    assert counted.ranks == {0: RankTally(1, 2, 0.5), 1: RankTally(2, 2, 1.0)}
    assert counted.attached


def test_a_complete_version_that_a_newer_one_overtakes_is_counted_once() -> None:
    versions = [ready(1), ready(2), ready(3), committed(3), ready(4), committed(4), committed(5)]
    assert tally(attach_record(1, 0), ATTACHED, *versions).overtaken == 2


def test_a_base_version_that_the_engine_serves_already_is_not_overtaken() -> None:
    """It is live without a commit; what was complete before it and never live is."""
    assert tally(attach_record(1, 0), ready(0), ATTACHED, ready(1), committed(1)).overtaken == 0
    base = Attached(attachment="i1", engine="e", version=4, replaced=False)
    assert tally(attach_record(1, 3), ready(3), ready(4), ready(5), base, committed(5)).overtaken == 1


def test_a_paused_update_stalls_every_rank() -> None:
    counted = tally(attach_record(1, 0), ATTACHED, committed(1, ranks=(), stall_s=2.0))
    assert counted.ranks == {rank: RankTally(-1, 1, 2.0) for rank in range(2)}


def test_what_ends_before_it_is_live_was_refused_and_what_breaks_afterwards_failed() -> None:
    end = Detached(attachment="i1", engine="e")
    refused = tally(attach_record(1, 0), failed(), failed(), end)
    assert (refused.refused, refused.failed, refused.attached) == (1, 0, False)
    broken = tally(attach_record(1, 0), ATTACHED, failed(), failed(), end)
    assert (broken.refused, broken.failed, broken.attached) == (0, 1, False)
    finished = tally(attach_record(1, 0), ATTACHED, end)
    assert (finished.refused, finished.failed, finished.attached) == (0, 0, False)


def test_a_commit_that_ends_behind_the_failure_of_its_attachment_is_counted() -> None:
    """The coordinator detaches only behind it."""
    counted = tally(attach_record(1, 0), ATTACHED, ready(1), ready(2), failed(), committed(2), failed())
    assert counted.ranks[0].commits == 1 and (counted.overtaken, counted.failed, counted.attached) == (1, 1, False)
    counted.take(ATTACHED)  # said by a thread that had not heard of the failure
    assert not counted.attached
    counted.take(Detached(attachment="i1", engine="e"))
    assert not counted.take(committed(3)) and counted.ranks[0].commits == 1


def test_another_engine_is_not_counted() -> None:
    counted = EngineTally("e", 2)
    others = [attach_record(1, 0, engine="f"), ATTACHED, sealed(1, 0), committed(1), failed()]
    assert not any(counted.take(record) for record in others)
    assert counted == EngineTally("e", 2)
