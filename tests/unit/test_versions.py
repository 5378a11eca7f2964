"""The ledger of versions: complete lines only, whatever the order of records; attempts that did not count are waste."""

from __future__ import annotations

import pytest

from megastream.protocol.records import (
    Accepted,
    Attach,
    Committed,
    Emitted,
    RankCommit,
    Record,
    WeightsReady,
)
from megastream.rl.job import Pass
from megastream.rl.versions import Ledger, VersionLine

PASSES = [Pass("stream", "stream", 2, False), Pass("whole", "whole", 2, False)]


def attach(name: str) -> Attach:
    return Attach(
        attachment=name,
        incarnation=1,
        engine="e",
        family="qwen3_moe",
        kind="stream",
        base_version=0,
        trainer_world_size=2,
        finality="pipelined",
        piece_bytes=1,
        experts_per_unit=1,
        train_step=0,
    )


def records_of(version: int, attempt: int = 0) -> dict[str, list[Record]]:
    same = {"attachment": "a", "incarnation": 1, "version": version}
    emitted = [
        Emitted(**same, attempt=n, rank=r, pieces=1, payload_bytes=10, wire_bytes=15, elements=5, wait_s=0.0)
        for n in range(attempt + 1)
        for r in range(2)
    ]
    ready = WeightsReady(**same, attempt=attempt, train_step=1, plan_digest="d", units=("u",), elements=10)
    committed = Committed(
        **same, ranks=(RankCommit(0, True, 0.001, 1), RankCommit(1, True, 0.003, 1)), visible_unix_s=7
    )
    return {
        "emitted": list(emitted),
        "accepted": [Accepted(**same, attempt=attempt, train_step=1)],
        "ready": [ready],
        "committed": [committed],
    }


def run(order: tuple[str, ...], attempt: int = 0) -> tuple[Ledger, list[VersionLine]]:
    ledger, lines = Ledger(PASSES), []
    records = records_of(1, attempt)
    for record in (attach("a"), *(record for part in order for record in records[part])):
        line = ledger.take(record)
        if line is not None:
            lines.append(line)
    return ledger, lines


def test_line_is_complete_before_and_after_the_commit() -> None:
    for order in (("emitted", "accepted", "ready", "committed"), ("accepted", "committed", "emitted", "ready")):
        ledger, lines = run(order)
        assert [line.as_json() for line in lines] == [line.as_json() for line in ledger.of_pass("stream")]
        assert (lines[0].wire_bytes, lines[0].payload_bytes, lines[0].stall_ms) == (30, 20, 3.0)
        assert (lines[0].units, lines[0].wasted_bytes) == (1, 0)


def test_withdrawn_attempts_are_waste() -> None:
    _, lines = run(("emitted", "accepted", "ready", "committed"), attempt=2)
    assert (lines[0].wire_bytes, lines[0].wasted_bytes) == (30, 60)


def test_passes_follow_the_attachments() -> None:
    ledger, _ = run(("emitted", "accepted", "ready", "committed"))
    ledger.take(attach("b"))
    ledger.take(Accepted(attachment="b", incarnation=2, version=5, attempt=0, train_step=1))
    assert [line.version for line in ledger.of_pass("whole")] == [5]


@pytest.mark.parametrize(
    ("stall_s", "ranks", "expected"),
    [(0.25, (), 250.0), (None, (), None), (None, (RankCommit(0, True, 0.002, 1),), 2.0)],
)
def test_a_stall_is_measured_or_none(
    stall_s: float | None, ranks: tuple[RankCommit, ...], expected: float | None
) -> None:
    ledger = Ledger(PASSES)
    ledger.take(attach("a"))
    ledger.take(Committed(attachment="a", incarnation=1, version=1, ranks=ranks, visible_unix_s=7, stall_s=stall_s))
    assert ledger.lines[("a", 1)].stall_ms == expected
