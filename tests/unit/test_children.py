"""The launcher's watch: whoever ends before its time has failed, whatever its status, and silence has an end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastream.rl.children import Child, Children, RunFailed
from megastream.rl.owned import Owner, start_time


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started = start_time(os.getpid())
    assert started is not None
    with Children(tmp_path, Owner("r", os.getpid(), started, str(tmp_path)), 5.0, {}) as made:
        yield made


def run(children: Children, name: str, code: str) -> Child:
    """A child that runs `code`; the standard library's timeit is a module that takes a program as its argument."""
    return children.start(name, "timeit", "-n1", "-r1", code)


def test_one_that_ends_in_order_before_its_time_has_failed(children: Children) -> None:
    rank = run(children, "trainer-0", "import time; time.sleep(30)")
    run(children, "host", "pass")
    with pytest.raises(RunFailed, match="host ended with status 0"):
        children.watch(until=lambda: rank.ended, may_end=[rank], deadline_s=20)


def test_those_that_may_end_may_end_one_by_one(children: Children) -> None:
    ranks = [run(children, f"trainer-{n}", f"import time; time.sleep({n})") for n in range(2)]
    children.watch(until=lambda: all(rank.ended for rank in ranks), may_end=ranks, deadline_s=20)
    host = run(children, "host", "pass")
    children.watch(until=lambda: host.ended, may_end=[host], deadline_s=20)


def test_one_that_fails_has_failed(children: Children) -> None:
    rank = run(children, "trainer-0", "raise SystemExit(3)")
    with pytest.raises(RunFailed, match="trainer-0 ended with status"):
        children.watch(until=lambda: rank.ended, may_end=[rank], deadline_s=20)


def test_silence_ends_and_says_who_waited_for_whom(children: Children) -> None:
    rank = run(children, "trainer-7", "import time; time.sleep(30)")
    began = time.monotonic()
    signs = iter([0, 1, 2])
    with pytest.raises(RunFailed, match="the launcher waited 0.5 s for trainer-7"):
        children.watch(until=lambda: rank.ended, may_end=[rank], deadline_s=0.5, sign_of_life=lambda: next(signs, None))
    assert 0.5 < time.monotonic() - began < 10
