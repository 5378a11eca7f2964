"""The helper that runs ranks: results in order, and neither a failure nor a hang goes unnoticed."""

from __future__ import annotations

import time

import pytest

from tests.helpers.ranks import run_ranks


def _square(rank: int, world_size: int, init_method: str, power: int) -> int:
    return int(rank**power) + world_size


def _rank_one_fails(rank: int, world_size: int, init_method: str) -> None:
    if rank == 1:
        raise ZeroDivisionError("planted")
    _sleep_for_ever(rank, world_size, init_method)


def _sleep_for_ever(rank: int, world_size: int, init_method: str) -> None:
    time.sleep(100)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(_square, 3, power=2) == [3, 4, 7]


def test_a_rank_that_raises_ends_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match="ZeroDivisionError: planted"):
        run_ranks(_rank_one_fails, 2, timeout_s=60)
    assert time.monotonic() - started < 20


def test_a_hang_is_a_failure_with_stacks() -> None:
    with pytest.raises(AssertionError, match=r"Timeout(.|\n)*_sleep_for_ever"):
        run_ranks(_sleep_for_ever, 1, timeout_s=1)
