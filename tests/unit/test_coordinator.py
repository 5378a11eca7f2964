"""The coordinator against a log in memory and a core that answers when told to. No lanes, no weights."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megastream.engine.settings import EngineSettings
from megastream.protocol.part_records import GateSet, SetGate
from megastream.protocol.records import (
    Accepted,
    Attached,
    Committed,
    Compared,
    Detached,
    Failed,
    LanesOpen,
    Poisoned,
    Sealed,
    TrainingFinished,
    WeightsReady,
)
from tests.helpers.coordinator_bench import Bench, bench
from tests.helpers.plans import attach_record
from tests.helpers.spine import eventually


def test_equal_weights_are_attached_without_a_commit_and_versions_follow() -> None:
    with bench() as b:
        b.attach()
        b.live()
        assert b.core.asked == [] and b.records(Attached)[0].replaced is False
        b.version(1)
        eventually(lambda: len(b.core.asked) == 1)
        assert b.records(Committed) == [], "nothing is said before all ranks replied"
        b.core.answer()
        eventually(lambda: [r.version for r in b.records(Committed)] == [1])


def test_another_label_for_equal_weights_is_committed_so_that_tokens_carry_it() -> None:
    with bench() as b:
        b.attach(base=7)
        eventually(lambda: len(b.core.asked) == 1)
        b.core.answer()
        b.live()
        assert b.core.version == 7 and b.records(Attached)[0].replaced is False


def test_a_fresh_engine_takes_the_weights_of_a_resumed_trainer_before_its_first_step() -> None:
    with bench() as b:
        b.attach(base=5, differing=3)
        eventually(lambda: len(b.core.asked) == 1)
        b.core.answer()
        b.live()
        assert b.core.version == 5 and b.records(Attached)[0].replaced is True


def test_a_fresh_engine_refuses_a_version_0_that_is_not_what_it_serves() -> None:
    with bench() as b:
        b.attach(base=0, differing=3)
        eventually(lambda: len(b.records(Failed)) == 1)
        assert "version 0 is not what engine e serves: 3 of 7 tensors differ" in b.records(Failed)[0].reason
        assert b.core.asked == [], "nothing is written over"


def test_a_failure_with_a_commit_under_way_detaches_only_after_the_replies() -> None:
    with bench() as b:
        b.attach()
        b.live()
        b.version(1)
        eventually(lambda: len(b.core.asked) == 1)
        b.post(Failed(attachment="i1", side="engine", rank=0, reason="a lane broke"))
        b.version(2)
        with pytest.raises(AssertionError):
            eventually(lambda: bool(b.records(Detached)), 0.3)
        b.core.answer()
        eventually(lambda: len(b.records(Detached)) == 1)
        assert b.core.asked == [], "no version of an attachment that failed is committed any more"


def test_only_the_finished_event_of_this_attachment_ends_it() -> None:
    with bench() as b:
        b.attach()
        b.live()
        stale = dict(version=0, reason="done")
        b.post(TrainingFinished(attachment="i0", incarnation=0, **stale))
        with pytest.raises(AssertionError):
            eventually(lambda: bool(b.records(Detached)), 0.3)
        b.post(TrainingFinished(attachment="i1", incarnation=1, **stale))
        b.post(TrainingFinished(attachment="i1", incarnation=1, **stale))
        eventually(lambda: len(b.records(Detached)) == 1)


def test_the_last_version_that_never_comes_ends_at_the_deadline() -> None:
    with bench(EngineSettings(detach_s=0.2, poll_s=0.02)) as b:
        b.attach()
        b.live()
        b.post(TrainingFinished(attachment="i1", incarnation=1, version=3, reason="done"))
        eventually(lambda: len(b.records(Detached)) == 1)


@pytest.mark.parametrize(
    ("incarnation", "base", "changes", "words"),
    [
        (2, 9, {"attachment": "x"}, "attached to incarnation 2 .*incarnation 2 can attach once that has finished"),
        (1, 9, {}, "version 0 of incarnation 2 live; base version 9 of incarnation 1 would go backwards"),
        (3, 5, {"namespace": "lora"}, "namespace='lora' is not supported"),
        (3, 5, {"membership_epoch": 2}, "membership_epoch=2 is not supported"),
    ],
)
def test_an_attach_that_cannot_be_is_refused_and_the_held_one_goes_on(
    incarnation: int, base: int, changes: dict[str, Any], words: str
) -> None:
    with bench() as b:
        b.attach(incarnation=2)
        b.live(2)
        b.post(attach_record(incarnation, base, **changes))
        eventually(lambda: len(b.records(Detached)) == 1)
        assert re.search(words, b.records(Failed)[0].reason)
        b.version(1, incarnation=2)
        eventually(lambda: len(b.core.asked) == 1)


def test_an_incarnation_below_what_is_live_is_refused() -> None:
    with bench() as b:
        b.attach(incarnation=2)
        b.live(2)
        b.post(TrainingFinished(attachment="i2", incarnation=2, version=0, reason="done"))
        eventually(lambda: len(b.records(Detached)) == 1)
        b.post(attach_record(1, base=5))
        eventually(lambda: len(b.records(Failed)) == 1)
        assert "would go backwards" in b.records(Failed)[0].reason


def test_a_seal_under_another_plan_ends_the_attachment_once() -> None:
    with bench() as b:
        b.attach()
        b.live()
        b.version(1, digest="other")
        eventually(lambda: len(b.records(Detached)) == 1)
        assert [record.reason for record in b.records(Failed)] == [
            "engine rank 0 sealed version 1 under plan other, agreed was digest"
        ]


def test_a_commit_that_nobody_answers_is_reported() -> None:
    with bench(EngineSettings(commit_s=0.2, poll_s=0.02)) as b:
        b.attach()
        b.live()
        b.version(1)
        eventually(lambda: len(b.records(Failed)) == 1)
        assert "a commit was enqueued 0.2 s ago" in b.records(Failed)[0].reason
        assert b.records(Detached) == [], "the commit may still happen"
        b.core.answer()
        eventually(lambda: len(b.records(Detached)) == 1)


def test_a_trainer_that_never_opens_its_lanes_is_named() -> None:
    with bench(EngineSettings(bind_s=0.2, poll_s=0.02)) as b:
        b.post(attach_record())
        eventually(lambda: len(b.records(Detached)) == 1)
        assert "waited 0.2 s for the trainer to open its lanes" in b.records(Failed)[0].reason


def test_a_poisoned_engine_is_healed_by_the_next_version_or_the_next_attachment() -> None:
    with bench() as b:
        b.attach()
        b.live()
        b.version(1)
        eventually(lambda: len(b.core.asked) == 1)
        b.core.answer(ok=False)
        eventually(lambda: len(b.records(Poisoned)) == len(b.core.poisons) == 1)
        assert b.records(Committed) == []
        b.post(Failed(attachment="i1", side="trainer", rank=0, reason="gone"))
        b.attach(incarnation=2, base=2, differing=3)
        eventually(lambda: len(b.core.asked) == 1)
        b.core.answer()
        b.live(2)
        assert b.records(Attached)[-1].replaced is True


def test_records_out_of_place_end_their_attachment_and_the_next_one_attaches() -> None:
    with bench() as b:
        b.post(attach_record())
        for rank in range(2):  # before anything was bound, let alone arrived
            b.post(Compared(attachment="i1", rank=rank, tensors=1, differing=0))
        eventually(lambda: len(b.records(Detached)) == 1)
        assert "engine e cannot use a record Compared: AssertionError" in b.records(Failed)[0].reason
        b.attach(incarnation=2)
        b.live(2)


def test_a_coordinator_that_lost_the_control_plane_says_so_later_and_takes_the_next_trainer() -> None:
    with bench(EngineSettings(poll_s=0.02, retry_s=0.05)) as b:
        b.attach()
        b.live()
        b.store.away = True
        eventually(lambda: b.coordinator._bond is None)
        b.store.away = False
        eventually(lambda: len(b.records(Detached)) == 1)
        assert "engine e had lost the control plane: the server in memory is away" in b.records(Failed)[0].reason
        b.attach(incarnation=2)
        b.live(2)


def test_a_late_joiner_begins_at_the_first_version_that_is_whole() -> None:
    """Its attachment said 5 or newer; 5 was withdrawn, 7 came."""
    with bench() as b:
        b.post(attach_record(1, 5, late_joiner=True))
        b.post(LanesOpen(attachment="i1", digest="digest"))
        b.post(Accepted(attachment="i1", incarnation=1, version=5, attempt=1, train_step=5))
        b.version(7)
        for rank in range(2):
            b.post(Compared(attachment="i1", rank=rank, tensors=7, differing=7, first="w"))
        eventually(lambda: bool(b.core.asked))
        assert b.core.asked[0][0].version == 7 and b.records(Attached) == []
        b.core.answer()
        b.live()
        assert b.records(Attached)[0].version == 7 and b.records(Attached)[0].replaced
        b.version(8)
        eventually(lambda: bool(b.core.asked))
        assert b.core.asked[0][0].version == 8


def test_the_same_incarnation_attaches_again_once_its_attachment_has_ended() -> None:
    with bench() as b:
        b.attach()
        b.live()
        b.post(attach_record(1, 0, attachment="i1-2", late_joiner=True))
        eventually(lambda: any(record.attachment == "i1-2" for record in b.records(Failed)))
        assert "is attached to incarnation 1 (i1)" in b.records(Failed)[0].reason
        b.post(Failed(attachment="i1", side="trainer", rank=2, reason="a lane broke"))
        eventually(lambda: any(record.attachment == "i1" for record in b.records(Detached)))
        b.post(attach_record(1, 3, attachment="i1-3", late_joiner=True))
        b.post(LanesOpen(attachment="i1-3", digest="digest"))
        name = {"attachment": "i1-3", "incarnation": 1, "version": 3, "attempt": 1}
        b.post(*(Sealed(**name, rank=r, plan_digest="digest", elements=5, prepare_s=0.0) for r in range(2)))
        b.post(Accepted(**name, train_step=3))
        b.post(WeightsReady(**name, train_step=3, plan_digest="digest", units=(), elements=10))
        for rank in range(2):
            b.post(Compared(attachment="i1-3", rank=rank, tensors=7, differing=7, first="w"))
        eventually(lambda: bool(b.core.asked))
        b.core.answer()
        eventually(lambda: any(r.attachment == "i1-3" and r.version == 3 for r in b.records(Attached)))


def test_a_rank_that_says_again_what_it_compared_is_not_judged_again() -> None:
    """All ranks are asked for the next slice until the last one is done: one of fewer slices may come behind it."""
    with bench() as b:
        b.bind(base=5)
        b.version(5)
        for rank in (1, 0, 1):
            b.post(Compared(attachment="i1", rank=rank, tensors=7, differing=7, first="w"))
        nothing_failed(b)
        b.core.answer()
        b.live()
        b.post(Compared(attachment="i1", rank=1, tensors=7, differing=7, first="w"))
        b.version(6)
        nothing_failed(b)
        assert len(b.records(Attached)) == 1


def nothing_failed(b: Bench) -> None:
    """All that was posted is read, and a commit is asked for."""
    request = f"look {len(b.store.records)}"
    b.post(SetGate(engine="e", gate="nothing", request=request))
    eventually(lambda: any(record.request == request for record in b.records(GateSet)))
    assert len(b.core.asked) == 1 and b.records(Failed) == []


def test_an_attachment_that_failed_while_its_base_was_committed_is_not_said_to_be_attached() -> None:
    with bench() as b:
        b.attach(base=5, differing=3)
        eventually(lambda: len(b.core.asked) == 1)
        b.post(Failed(attachment="i1", side="engine", rank=0, reason="a lane broke"))
        eventually(lambda: b.coordinator._bond is not None and bool(b.coordinator._bond.failed))
        b.core.answer()
        eventually(lambda: len(b.records(Detached)) == 1)
        assert b.records(Attached) == [] and [record.version for record in b.records(Committed)] == [5]
