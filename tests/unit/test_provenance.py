"""The join of records: it counts what is wrong, and refuses to count when a record is missing."""

from __future__ import annotations

import pytest

from megastream.rl.provenance import Answer, Batch, ProvenanceError, TokenCounts, check_tokens

BATCHES = [
    Batch(1, "0", {"a": 1}),
    Batch(2, "0", {"a": 1, "b": 1}),
    Batch(3, "1", {"a": 1, "b": 1}),
    Batch(4, "1", {"b": 1}),
]
RANKS = [[(1, "0"), (2, "0"), (3, "1"), (4, "1")]] * 2
ANSWERS = [Answer("a", 3, (("0", 0, 2), ("1", 2, 3))), Answer("b", 3, (("0", 0, 1), ("1", 1, 3)))]


def count(batches=BATCHES, ranks=RANKS, answers=ANSWERS, wanted=lambda version: True) -> TokenCounts:
    return check_tokens(batches, ranks, answers, wanted)


def test_all_is_well() -> None:
    assert count() == TokenCounts(6, 0, 0)
    assert count(wanted=lambda version: version == "1") == TokenCounts(3, 0, 0)


def test_a_rank_that_skipped_a_commit_is_counted() -> None:
    skipping = [(1, "0"), (2, "0"), (3, "0"), (4, "1")]
    assert count(ranks=[RANKS[0], skipping]) == TokenCounts(6, 2, 2)


def test_a_wrong_rank_or_label_does_not_take_a_token_out_of_the_count() -> None:
    lost = [(step, "?") for step, _ in RANKS[0]]
    for ranks in ([lost, RANKS[1]], [RANKS[0], lost]):
        assert count(ranks=ranks, wanted=str.isdecimal) == TokenCounts(6, 6, 6)
    other = [Answer("a", 3, (("0", 0, 2), ("7", 2, 3))), ANSWERS[1]]
    assert count(answers=other, wanted=lambda version: version == "7") == TokenCounts(1, 0, 1)


def test_a_label_taken_at_output_time_is_counted() -> None:
    late = [Answer("a", 3, (("0", 0, 1), ("1", 1, 3))), ANSWERS[1]]
    assert count(answers=late) == TokenCounts(6, 0, 1)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ranks": [RANKS[0], RANKS[0][:-1]]}, "rank 1 has no record of step 4"),
        ({"batches": BATCHES[:-1]}, "request b has 3 tokens"),
        ({"answers": [Answer("a", 3, (("0", 0, 2),))]}, "do not cover"),
        ({"answers": [Answer("c", 1, (("0", 0, 1),))]}, "request c"),
        ({"ranks": [RANKS[0], [*RANKS[0], (1, "7")]]}, "two records of step 1"),
    ],
)
def test_missing_records_are_errors(change: dict, word: str) -> None:
    with pytest.raises(ProvenanceError, match=word):
        count(**change)
