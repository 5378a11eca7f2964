"""A rank's pull on its own: who waits for whom, what is thrown away, and what is said when the sender is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megastream.engine.pull import Pull
from megastream.engine.settings import EngineSettings
from megastream.protocol.lane import LaneError
from megastream.protocol.staging import Key, PieceRefused
from tests.helpers.fake_engine import FakeLive
from tests.helpers.plans import header_of
from tests.helpers.staged_rank import ENGINES, PLAN, TERM, packed
from tests.helpers.synthetic import differing

PIECES = PLAN.by_target[1]


class Rank:
    """It pulls everything; `came` are the answers to what its lane brought."""

    def __init__(self, commit_s: float = 10.0) -> None:
        self.live = FakeLive(ENGINES[1])
        self.pull = Pull(PIECES, ENGINES[1], self.live, EngineSettings(commit_s=commit_s))
        self.came: list[Any] = []

    def bring(self, version: int, pieces: Any = PIECES) -> None:
        """What a lane's thread does."""
        key = Key(1, version, 0)
        for piece in pieces:
            header = header_of(piece, version, 0, TERM)
            try:
                admitted = self.pull.admit(key, header)
            except (LaneError, PieceRefused) as error:
                self.came.append(str(error))
                return
            self.came.append(admitted)
            if admitted:
                self.pull.write(key, header, packed(piece, version))

    def run(self, version: int) -> str:
        return self.pull.run(Key(1, version, 0))


def started(call: Callable[..., Any], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=call, args=args, daemon=True)
    thread.start()
    return thread


def test_pieces_wait_for_the_commit_and_are_live_when_it_returns() -> None:
    rank = Rank()
    for version in (1, 2):
        lanes = [started(rank.bring, version, PIECES[n::3]) for n in range(3)]
        time.sleep(0.05)
        assert rank.came == [] and differing(rank.live.layout, rank.live.buffers, version - 1) == []
        assert rank.run(version) == "" and differing(rank.live.layout, rank.live.buffers, version) == []
        for lane in lanes:
            lane.join(10)
        assert rank.came == [True] * len(PIECES)
        rank.came.clear()
        assert rank.pull._apart == {} and not rank.pull._complete, "and nothing is kept"


def test_a_commit_does_not_wait_for_ever_and_what_comes_late_is_thrown_away() -> None:
    rank = Rank(commit_s=0.6)
    lane = started(rank.bring, 1, PIECES[:3])
    assert rank.run(1).startswith(f"3 of {len(PIECES)} pieces were pulled within 0.3 s, half of commit_s; raise it, ")
    lane.join(10)
    rank.came.clear()
    rank.bring(1, PIECES[3:])
    assert rank.came == [False] * (len(PIECES) - 3)
    lane = started(rank.bring, 2)
    assert rank.run(2) == "" and differing(rank.live.layout, rank.live.buffers, 2) == [], "the next one heals"


def test_a_piece_that_nobody_asks_for_is_refused() -> None:
    rank = Rank(commit_s=0.2)
    rank.bring(1, PIECES[:1])
    assert len(rank.came) == 1 and "to pull, but no commit of it came for 0.2 s" in rank.came[0]


def test_a_sender_that_is_lost_ends_the_commit_at_once() -> None:
    rank = Rank(commit_s=60)
    bringing = started(rank.bring, 1, PIECES[:2])
    said: list[str] = []
    commit = started(lambda: said.append(rank.run(1)))
    bringing.join(10)
    waiting = started(rank.bring, 2, PIECES[:1])
    rank.pull.lost(header_of(PIECES[2], 1, 0, TERM))
    commit.join(10)
    waiting.join(10)
    gone = f"the lane from trainer rank {PIECES[2].source} broke while version 1 was pulled"
    assert said == [f"2 of {len(PIECES)} pieces were pulled, then {gone}"]
    assert rank.came[-1] == gone, "no lane waits for a commit that does not come"
    assert rank.run(2) == f"nobody sends what has to be pulled: {gone}"


def test_a_sender_that_leaves_behind_its_last_piece_breaks_nothing() -> None:
    rank = Rank()
    honest = rank.live.write_live

    def last(staging: Any) -> None:
        honest(staging)
        rank.pull.end("the trainer has gone")

    rank.live.write_live = last  # type: ignore[method-assign]
    lane = started(rank.bring, 1)
    for _ in range(2):
        lane.join(0.01)
    error = rank.run(1)
    lane.join(10)
    assert error == "" or "then the trainer has gone" in error
    assert (error == "") == (differing(rank.live.layout, rank.live.buffers, 1) == [])


def test_a_piece_is_pulled_once() -> None:
    rank = Rank(commit_s=1)
    lane = started(rank.bring, 1, [PIECES[0], PIECES[0]])
    assert rank.run(1).startswith("1 of ")
    lane.join(10)
    assert rank.came[0] is True and f"piece {PIECES[0].seq} " in rank.came[1] and "pulled already" in rank.came[1]


@pytest.mark.parametrize("failures", [1, 2])
def test_a_write_that_fails_is_made_again_once(failures: int) -> None:
    rank = Rank()
    rank.live.break_commits = failures
    lane = started(rank.bring, 1)
    assert rank.run(1) == ("" if failures == 1 else "RuntimeError: injected: the copy failed")
    lane.join(10)
    assert not lane.is_alive() and (differing(rank.live.layout, rank.live.buffers, 1) == []) == (failures == 1)


def test_no_write_outlasts_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is slow would otherwise write over what the next version has written."""
    rank, writes, goes_on = Rank(commit_s=0.4), threading.Event(), threading.Event()
    honest = rank.pull._scatter

    def slowly(*args: Any) -> None:
        writes.set()
        assert goes_on.wait(10)
        honest(*args)

    monkeypatch.setattr(rank.pull, "_scatter", slowly)
    rank.pull._pull_s = 5.0
    lane = started(rank.bring, 1, PIECES[:1])
    said: list[str] = []
    commit = started(lambda: said.append(rank.run(1)))
    assert writes.wait(10)
    rank.pull.end("a lane broke")
    commit.join(0.2)
    assert said == [], "it waits for the write that is under way"
    goes_on.set()
    commit.join(10)
    lane.join(10)
    assert len(said) == 1 and said[0].endswith("a lane broke")


def test_padding_of_a_buffer_that_is_put_together_is_zero() -> None:
    rank = Rank()
    seen: list[torch.Tensor] = []
    honest = rank.live.write_live

    def watched(staging: Any) -> None:
        seen.extend(staging.values())
        honest(staging)

    rank.live.packs = lambda name: True
    rank.live.write_live = watched  # type: ignore[method-assign]
    lane = started(rank.bring, 1)
    assert rank.run(1) == ""
    lane.join(10)
    assert len(seen) == len(rank.pull._need) and not any(bool(tensor.isnan().any()) for tensor in seen)
    assert differing(rank.live.layout, rank.live.buffers, 1) == []
