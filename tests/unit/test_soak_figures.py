"""tools/soak.py: what it says of made-up figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.soak import Sample, bad_tokens, grown, growth, moved, settled

NAMES = {1: "python", 2: "valkey-server"}
SAMPLES = [
    Sample(
        updates=number,
        seconds=number / 4,
        kib={1: 5000 + 400 // number + number % 3, 2: 900 + 10 * number},
        files={1: 30, 2: 8},
        segments=5,
        keys=3,
        log_entries=30 * number,
        tokens=100 * number,
    )
    for number in range(10, 210, 10)
]


def test_noise_a_beginning_and_the_servers_log_are_no_growth() -> None:
    assert [one.updates for one in settled(SAMPLES)] == [*range(50, 210, 10)]
    assert grown(NAMES, settled(SAMPLES), [], 1.0) == []
    assert growth(SAMPLES, [], 2) == pytest.approx(10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n: {"kib": {1: 5000 + 2 * n, 2: 0}}, "python (1) grows by 2.00 KiB per update"),
        (lambda n: {"files": {1: 30 + n // 100, 2: 8}}, "python (1) had 30 files open, and now 32"),
        (lambda n: {"files": {1: 30, 2: 8 + n}}, "valkey-server (2) had 58 files open, and now 208"),
        (lambda n: {"segments": n}, "there were 50 segments, and now there are 200"),
        (lambda n: {"keys": n}, "there were 50 keys, and now there are 200"),
    ],
)
def test_whatever_grows_is_named(change, words: str) -> None:  # type: ignore[no-untyped-def]
    samples = [replace(one, **change(one.updates)) for one in SAMPLES]
    assert grown(NAMES, settled(samples), [], 1.0) == [words]


def test_what_tokens_cost_without_updates_is_taken_off() -> None:
    """2 KiB an update, of which the 100 tokens of an update cost 1.5 also when there is none."""
    samples = settled([replace(one, kib={1: 5000 + 2 * one.updates}) for one in SAMPLES])
    alone = [
        replace(one, kib={1: 9000 + 15 * number}, tokens=50_000 + 1000 * number) for number, one in enumerate(samples)
    ]
    assert growth(samples, alone, 1) == pytest.approx(0.5)
    assert grown({1: "python"}, samples, alone, 0.6) == []
    assert grown({1: "python"}, samples, alone, 0.4) == ["python (1) grows by 0.50 KiB per update"]
    freed = [replace(one, kib={1: 9000 - one.tokens}) for one in alone]
    assert growth(samples, freed, 1) == pytest.approx(2), "memory that is given back hides nothing"


def test_what_moves_and_wrong_tokens_are_named() -> None:
    before = [{"a": 1, "b": 2}, {"a": 3}]
    assert moved(before, before) == []
    assert moved(before, [{"a": 1, "b": 9}, {}]) == ["b of rank 0 has moved", "a of rank 1 has moved"]
    assert bad_tokens({"tokens": 9, "mixed": 0, "mislabelled": 0}) == []
    assert bad_tokens({"tokens": 9, "mixed": 1, "mislabelled": 2}) == [
        "1 of 9 tokens are mixed",
        "2 of 9 tokens are mislabelled",
    ]
