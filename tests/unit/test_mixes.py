"""What becomes of live weights of two versions when the rest of the newer one is late, taken back or sent anew."""

from __future__ import annotations

import re

import pytest

from megastream.engine.settings import EngineSettings
from megastream.protocol.book import TrainerBook
from megastream.protocol.part_records import Mixed, PartCommitted
from megastream.protocol.records import Attached, Committed, Detached, Failed, Poisoned, TrainingFinished
from megastream.sync import EngineSync, SyncError
from tests.helpers.coordinator_bench import SETTINGS, STAGES, Bench, asked, bench, nothing_asked
from tests.helpers.edits import replace
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.spine import eventually


def live_in_part(b: Bench) -> None:
    """The first stage of version 1 is live, the second is at 0."""
    b.attach()
    b.live()
    b.part(1, STAGES["s0"])
    b.accept(1)
    asked(b)
    b.core.answer()
    eventually(lambda: len(b.records(PartCommitted)) == 1)


def test_a_manifest_that_does_not_come_is_reported_and_the_next_complete_version_is_taken_whole() -> None:
    with bench(EngineSettings(manifest_s=0.2, poll_s=0.02), "stage") as b:
        live_in_part(b)
        eventually(lambda: len(b.records(Mixed)) == 1)
        assert "part of version 1 is live, and 0.2 s later it is not complete" in b.records(Mixed)[0].reason
        b.part(2, STAGES["s0"])
        b.accept(2)
        nothing_asked(b)
        b.version(2)
        assert asked(b).units is None
        b.core.answer()
        b.part(3, STAGES["s0"])
        b.accept(3)
        assert asked(b).label == "2..3+2", "parts again, once it is no mix any more"


def test_the_time_for_a_manifest_begins_anew_with_each_version() -> None:
    with bench(EngineSettings(manifest_s=0.3, poll_s=0.02), "stage") as b:
        live_in_part(b)
        b.version(1)
        asked(b)
        b.core.answer()
        eventually(lambda: len(b.records(Committed)) == 1)
        deadline = b.coordinator._bond.manifest_by_s
        b.part(2, STAGES["s0"])
        b.accept(2)
        asked(b)
        assert deadline == b.coordinator._bond.manifest_by_s == float("inf")
        b.core.answer()
        eventually(lambda: len(b.records(PartCommitted)) == 2)
        assert b.coordinator._bond.manifest_by_s < float("inf")


def test_what_the_trainer_takes_back_is_forgotten_behind_the_commit_that_is_under_way() -> None:
    with bench(SETTINGS, "stage") as b:
        b.attach()
        b.live()
        b.part(1, STAGES["s0"])
        b.accept(1)
        asked(b)
        b.withdraw(1)
        drop = ("drop", {"attachment": "i1", "version": 1, "attempt": 0})
        eventually(lambda: drop in b.core.called)
        b.core.answer()
        eventually(lambda: len(b.records(PartCommitted)) == 1)
        (mixed,) = b.records(Mixed)
        assert (mixed.version, mixed.label) == (1, "0..1+2") and "took the rest of it back" in mixed.reason
        b.version(1)  # ranks had it complete before they heard; the manifest cannot be, and is not believed
        b.part(2, STAGES["s0"])
        b.accept(2)
        nothing_asked(b)
        b.version(2)
        assert (asked(b).units, asked(b).label) == (None, "2")
        b.core.answer()
        eventually(lambda: [r.version for r in b.records(Committed)] == [2])
        b.part(3, STAGES["s0"])
        b.accept(3)
        assert asked(b).label == "2..3+2"


def test_what_is_taken_back_before_a_part_of_it_is_live_leaves_nothing_behind() -> None:
    with bench(SETTINGS, "stage") as b:
        b.attach()
        b.live()
        b.accept(1)
        b.withdraw(1)
        b.part(1, STAGES["s0"])  # said before this rank heard of it
        nothing_asked(b)
        b.part(2, STAGES["s0"])
        b.accept(2)
        assert asked(b).label == "0..2+2" and b.records(Mixed) == []
        assert [payload["version"] for op, payload in b.core.called if op == "drop"] == [1]


def test_a_mix_that_is_left_behind_is_written_over_at_the_next_attachment() -> None:
    """Also when every byte equals the base version: the engine's stamp does not."""
    with bench(EngineSettings(detach_s=0.1, poll_s=0.02), "stage") as b:
        live_in_part(b)
        b.post(TrainingFinished(attachment="i1", incarnation=1, version=1, reason="gone"))
        eventually(lambda: len(b.records(Detached)) == 1)
        (mixed,) = b.records(Mixed)
        assert mixed.label == "0..1+2" and "its attachment has ended" in mixed.reason
        b.attach(incarnation=2, base=2)
        assert (asked(b).units, asked(b).label) == (None, "2")


def test_an_engine_that_comes_back_in_a_mix_takes_that_very_version_whole() -> None:
    """The attachment broke in the middle of version 1, which is still the newest one when the engine joins again."""
    with bench(SETTINGS, "stage") as b:
        live_in_part(b)
        b.post(Failed(attachment="i1", side="trainer", rank=2, reason="a lane broke"))
        eventually(lambda: len(b.records(Detached)) == 1)
        b.attach(1, 1, differing=3, attachment="i1-2", late_joiner=True)
        assert (asked(b).attachment, asked(b).units, asked(b).label) == ("i1-2", None, "1")
        b.core.answer()
        b.live(attachment="i1-2")
        assert b.records(Attached)[-1].replaced and len(b.records(Failed)) == 1
        b.part(2, STAGES["s0"], "i1-2")
        b.accept(2, "i1-2")
        assert asked(b).label == "1..2+2"


def test_nothing_is_live_in_part_before_a_late_joiner_has_its_first_version_whole() -> None:
    with bench(SETTINGS, "stage") as b:
        b.bind(1, 5, late_joiner=True)
        b.part(5, STAGES["s0"])
        b.accept(5)
        nothing_asked(b)
        b.withdraw(5)
        b.part(7, STAGES["s0"])
        b.version(7)
        eventually(lambda: "compare" in [op for op, _ in b.core.called])
        nothing_asked(b)
        b.compared(differing=7)
        assert (asked(b).units, asked(b).label) == (None, "7")
        b.core.answer()
        b.live()
        b.part(8, STAGES["s0"])
        b.accept(8)
        assert asked(b).label == "7..8+2"


def test_a_version_that_an_engine_skips_is_no_part_of_its_mixes() -> None:
    with bench(SETTINGS, "stage") as b:
        b.attach()
        b.live()
        b.part(3, STAGES["s0"])
        b.accept(3)
        assert asked(b).label == "0..3+2" and set(asked(b).mix.vector().values()) == {0, 3}


def test_the_versions_of_all_units_are_read_from_the_log() -> None:
    with bench(SETTINGS, "stage") as b:
        live_in_part(b)
        host = EngineSync(b.log, engine="e")
        expected = {**dict.fromkeys(STAGES["s0"], 1), **dict.fromkeys(STAGES["s1"], 0)}
        assert host.versions("0..1+2") == expected
        for engine, label in (("e", "0..1+1"), ("e", "1"), ("another", "0..1+2")):
            with pytest.raises(SyncError, match=f"engine {engine} was ever at {re.escape(repr(label))}"):
                EngineSync(b.log, engine=engine).versions(label)


def test_a_label_is_explained_for_as_long_as_the_log_keeps_the_commits_of_its_parts() -> None:
    """An attachment lives longer than the records with which it began."""
    with bench(SETTINGS, "stage") as b:
        live_in_part(b)
        first = STAGES["s1"][0]
        known = EngineSync(b.log, engine="e").versions("0..1+2")
        commits = b.records(PartCommitted)
        two = replace(commits[0], units=(first,), label="0..1+3")
        kept = MemoryStore()
        kept.blobs, kept.records = dict(b.store.blobs), [*commits, two]
        host = EngineSync(MemoryLog(kept), engine="e")
        assert host.versions("0..1+2") == known
        assert host.versions("0..1+3") == {**known, first: 1}
        kept.records = [two]  # the first part's record is forgotten, too: what was ahead is not known
        with pytest.raises(SyncError, match="as long as it keeps the records of their commits"):
            host.versions("0..1+3")


def test_a_trainer_that_waits_for_a_version_of_which_a_part_failed_goes_on_waiting() -> None:
    book = TrainerBook("i1", "e", trainer_ranks=1, engine_ranks=1)
    book.take(Poisoned(engine="e", version=1, reason="a part", part=True))
    assert not book.is_poisoned_by(1)
    book.take(Poisoned(engine="e", version=1, reason="the version"))
    assert book.is_poisoned_by(1)
