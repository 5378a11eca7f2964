"""Where units are staged under a budget: what fits, what is most worth it, what is short. Nothing but numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastream.plan.tiers import Bundle, Placement, StagingBudget, bundles_of, place

BUDGETS = st.none() | st.integers(0, 400)
BUNDLES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 4)), max_size=8).map(
    lambda rows: [
        Bundle((f"u{index}",), tuple(f"u{index}.{n}" for n in range(count)), size)
        for index, (size, count) in enumerate(rows)
    ]
)


def total(bundles: tuple[Bundle, ...]) -> int:
    return sum(bundle.num_bytes for bundle in bundles)


@settings(max_examples=100, deadline=None)
@given(bundles=BUNDLES, device=BUDGETS, host=BUDGETS, sets=st.integers(1, 3))
def test_every_bundle_has_one_place_and_no_budget_is_exceeded(
    bundles: list[Bundle], device: int | None, host: int | None, sets: int
) -> None:
    found = place(bundles, StagingBudget(device, host), sets)
    assert sorted((*found.device, *found.host, *found.pulled), key=bundles.index) == bundles
    assert found == place(list(bundles), StagingBudget(device, host), sets), "the same on every rank that asks"
    for placed, limit, others in (
        (found.device, device, (*found.host, *found.pulled)),
        (found.host, host, found.pulled),
    ):
        if limit is None:
            assert not others
            continue
        assert sets * total(placed) <= limit
        assert all(sets * (total(placed) + bundle.num_bytes) > limit for bundle in others), "nothing more would fit"


@settings(max_examples=100, deadline=None)
@given(bundles=BUNDLES, device=st.integers(0, 400), more=st.integers(0, 100))
def test_a_larger_budget_never_stages_less(bundles: list[Bundle], device: int, more: int) -> None:
    less, larger = (place(bundles, StagingBudget(limit, 0), 1) for limit in (device, device + more))
    assert total(less.device) <= total(larger.device)


@settings(max_examples=100, deadline=None)
@given(bundles=BUNDLES, device=st.integers(0, 400), host=st.integers(0, 400), sets=st.integers(1, 3))
def test_what_is_short_is_exactly_what_the_host_lacks(bundles: list[Bundle], device: int, host: int, sets: int) -> None:
    found = place(bundles, StagingBudget(device, host), sets)
    assert bool(found.short_bytes) == bool(found.pulled) == bool(found.shortage)
    if found.pulled:
        assert place(bundles, StagingBudget(device, host + found.short_bytes), sets).pulled == ()
        assert place(bundles, StagingBudget(device, host + found.short_bytes - 1), sets).pulled != ()


def test_small_buffers_come_first_and_what_does_not_fit_is_passed_over() -> None:
    """Of a layer's parts the dense one has many small buffers; experts are two large ones."""
    dense, experts = Bundle(("dense",), ("q", "o", "n", "g"), 40), Bundle(("e0:8", "e8:16"), ("w13", "w2"), 200)
    head = Bundle(("head",), ("lm_head",), 60)

    def names(placement: Placement) -> list[list[str]]:
        tiers = placement.device, placement.host, placement.pulled
        return [[bundle.units[0] for bundle in tier] for tier in tiers]

    assert names(place([experts, head, dense], StagingBudget(110, None), 1)) == [["dense", "head"], ["e0:8"], []]
    assert names(place([experts, head, dense], StagingBudget(260, 0), 1)) == [["dense", "head"], [], ["e0:8"]]
    assert names(place([head, experts], StagingBudget(199, 60), 1)) == [["head"], [], ["e0:8"]]
    assert names(place([experts, head], StagingBudget(0, 120), 2)) == [[], ["head"], ["e0:8"]], "two sets take twice"
    assert names(place([experts, head], StagingBudget(), 9)) == [["head", "e0:8"], [], []]


def test_units_that_share_a_buffer_stay_together() -> None:
    pairs = [("dense", "q"), ("e0:8", "w13"), ("e0:8", "w2"), ("dense", "o"), ("e8:16", "w2"), ("late", "b")]
    sizes = {"q": 1, "o": 2, "w13": 4, "w2": 8, "b": 16, "unused": 32}
    assert bundles_of(pairs, sizes) == (
        Bundle(("dense",), ("q", "o"), 3),
        Bundle(("e0:8", "e8:16"), ("w13", "w2"), 12),
        Bundle(("late",), ("b",), 16),
    )
    chain = [("a", "1"), ("b", "2"), ("b", "3"), ("c", "1"), ("c", "3")]
    assert [bundle.units for bundle in bundles_of(chain, dict.fromkeys("123", 1))] == [("a", "c", "b")]


def test_a_shortage_says_how_many_bytes_are_short_and_what_to_set() -> None:
    found = place([Bundle((f"u{n}",), (f"b{n}",), 10) for n in range(6)], StagingBudget(20, 25), 2)
    assert found.shortage == (
        "staging is 75 bytes short: 2 sets take 20 bytes of staging.device_bytes=20 and 20 of staging.host_bytes=25, "
        "and u2, u3, u4 and 1 more fit in neither; raise staging.host_bytes by 75, or set staging_sets lower"
    )


@pytest.mark.parametrize("wrong", [-1, 1.5, "8e9", True, 1 << 51])
@pytest.mark.parametrize("name", ["device_bytes", "host_bytes"])
def test_budgets_are_whole_numbers_of_bytes(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"staging.{name} must be a whole number of bytes, 0 to .*, got "):
        StagingBudget(**{name: wrong})
