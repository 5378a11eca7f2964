"""A rank's staging in two places: what is prepared, what is written inside the commit, what is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megastream.cli.plan_staging import staging_of
from megastream.engine.contract import NO_RANGES
from megastream.engine.settings import EngineSettings
from megastream.plan.pieces import PieceTable
from megastream.plan.tiers import StagingBudget
from megastream.plan.unit import experts_of
from megastream.protocol.mix import Gate
from megastream.protocol.staging import Key
from megastream.protocol.terms import ProtocolError
from tests.helpers.staged_rank import ENGINES, PLAN, Rank

ROOM = 1 << 30
DENSE = {copy.target_buffer for p in PLAN.by_target[1] if experts_of(p.unit) is None for copy in p.copies}
EXPERTS = {copy.target_buffer for p in PLAN.by_target[1] if experts_of(p.unit) is not None for copy in p.copies}


class TieredRank(Rank):
    """Its live model says which buffers were prepared, and which were written from host memory."""

    def __init__(self, device_bytes: int | None, host_bytes: int | None, gate: Gate) -> None:
        settings = EngineSettings(liveness_s=5, staging=StagingBudget(device_bytes, host_bytes))
        super().__init__(gate, settings=settings)
        self.prepared: list[str] = []
        self.written: list[str] = []
        prepare, write = self.live.prepare, self.live.write_live

        def watched_prepare(staging: Any, ranges: Any) -> Any:
            self.prepared += staging
            return prepare(staging, ranges)

        def watched_write(staging: Any, ranges: Any = NO_RANGES) -> None:
            self.written += staging
            write(staging, ranges)

        self.live.prepare, self.live.write_live = watched_prepare, watched_write  # type: ignore[method-assign]


def rank_with(device_bytes: int | None, host_bytes: int | None, gate: Gate = "version") -> TieredRank:
    return TieredRank(device_bytes, host_bytes, gate)


def bytes_of(rank: Rank, names: set[str]) -> int:
    return sum(t.nbytes for name, t in rank.live.buffers.items() if name in names)


def dense_budget() -> int:
    return 2 * bytes_of(rank_with(None, None), DENSE)


@pytest.mark.parametrize("where", ["device", "host", "both", "unset"])
def test_what_waits_on_the_device_is_prepared_and_the_rest_is_written_in_the_commit(where: str) -> None:
    budgets = {"device": (ROOM, 0), "host": (0, None), "both": (dense_budget(), None), "unset": (None, None)}
    rank = rank_with(*budgets[where])
    on_host = {"device": set(), "host": DENSE | EXPERTS, "both": EXPERTS, "unset": set()}[where]
    on_device = (DENSE | EXPERTS) - on_host
    for version in (1, 2):
        rank.receive(version, list(rank.pieces))
        assert set(rank.prepared) == on_device and rank.tensors_not_of(0) == set()
    assert rank.sink.tier_bytes == (2 * bytes_of(rank, on_device), 2 * bytes_of(rank, on_host))
    assert rank.written == [], "nothing is written before the commit"
    assert rank.commit(2, None) == "" and rank.tensors_not_of(2) == set()
    assert set(rank.written) == on_host and rank.sink._table.staged == ()
    rank.receive(3, list(rank.pieces))
    assert rank.commit(3, None) == "" and rank.tensors_not_of(3) == set(), "into a set that was used before"


@pytest.mark.parametrize("gate", ["stage", "idle_experts"])
def test_parts_become_live_from_host_memory_too(gate: Gate) -> None:
    rank = rank_with(0, None, gate)
    is_early = {"stage": lambda unit: unit.startswith("s0"), "idle_experts": lambda unit: experts_of(unit) is not None}
    early = tuple(sorted(filter(is_early[gate], rank.units())))
    behind = tuple(sorted(rank.units() - set(early)))
    rank.receive(1, [piece for piece in rank.pieces if piece.unit in early])
    assert rank.commit(1, early, behind) == ""
    assert rank.tensors_not_of(1) == {c.tensor for piece in rank.pieces for c in piece.copies if piece.unit in behind}
    rank.receive(1, [piece for piece in rank.pieces if piece.unit in behind])
    assert rank.commit(1, behind) == "" and rank.tensors_not_of(1) == set()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_write_from_host_memory_that_fails_is_made_again_once(failures: int) -> None:
    rank, left = rank_with(0, None), [failures]
    write = rank.live.write_live

    def broken(staging: Any, ranges: Any) -> None:
        write(dict(list(staging.items())[: len(staging) // 2]), ranges)
        if left[0]:
            left[0] -= 1
            raise RuntimeError("injected: half of it was written")
        write(staging, ranges)

    rank.live.write_live = broken  # type: ignore[method-assign]
    rank.receive(1, list(rank.pieces))
    error = rank.commit(1, None)
    assert error == ("" if failures == 1 else "RuntimeError: injected: half of it was written")
    assert bool(rank.tensors_not_of(1)) == (failures == 2)
    rank.receive(2, list(rank.pieces))
    assert rank.commit(2, None) == "" and rank.tensors_not_of(2) == set(), "the next version writes every unit"


def test_parts_and_overlays_need_everything_staged() -> None:
    whole = 2 * bytes_of(rank_with(None, None), DENSE | EXPERTS)
    words = rf"gate stage is for engines that stage everything, and staging is {whole - 7} bytes short: 2 sets .*"
    with pytest.raises(ProtocolError, match=words + "staging.host_bytes=7, and "):
        rank_with(0, 7, "stage")
    rank = rank_with(0, 7)
    with pytest.raises(ProtocolError, match=words):
        rank.sink.choose("stage")
    assert rank.sink.pulled == rank.units() and rank_with(0, whole, "stage").sink.pulled == frozenset()


@pytest.mark.parametrize("budget", [(0, 0), (None, 0), (0, None)])
def test_what_is_not_staged_is_pulled_inside_the_commit(budget: tuple[int | None, int | None]) -> None:
    """Nothing, the dense units on the device, or the dense units on the host: the rest comes when it is asked for."""
    dense = dense_budget()
    rank = rank_with(*(dense if limit is None else limit for limit in budget))
    pulled = [piece for piece in rank.pieces if piece.unit in rank.sink.pulled]
    staged = [piece for piece in rank.pieces if piece.unit not in rank.sink.pulled]
    assert pulled and bool(staged) == (budget != (0, 0))
    for version in (1, 2):
        rank.sink.accepted(version, 0)
        rank.receive(version, staged)
        assert rank.said[-1] == (version, sum(piece.num_elements for piece in staged))
        lanes = [threading.Thread(target=rank.receive, args=(version, pulled[n::2])) for n in (0, 1)]
        for lane in lanes:
            lane.start()
        assert rank.tensors_not_of(version - 1) == set(), "they wait for the commit"
        assert rank.commit(version, None) == "" and rank.tensors_not_of(version) == set()
        for lane in lanes:
            lane.join(10)
    assert rank.sink.tier_bytes == (2 * bytes_of(rank, DENSE) * (budget[0] is None), dense * (budget[1] is None))


def test_what_was_overtaken_leaves_both_places() -> None:
    rank = rank_with(dense_budget(), None)
    rank.receive(1, list(rank.pieces))
    rank.receive(2, list(rank.pieces))
    assert rank.sink.num_bytes == 2 * bytes_of(rank, DENSE | EXPERTS)
    assert rank.commit(2, None) == "" and rank.sink.num_bytes == 0
    assert "has left staging" in rank.commit(1, None) or "not prepared" in rank.commit(1, None)
    assert rank.tensors_not_of(2) == set()


def test_the_comparison_reads_both_places() -> None:
    rank = rank_with(dense_budget(), None)
    rank.receive(0, list(rank.pieces))
    comparison = rank.sink.compare(Key(1, 0, 0))
    assert comparison.step(60) and (comparison.differing, comparison.tensors) == (0, len(DENSE | EXPERTS))
    rank.sink.passed(0)
    name = min(EXPERTS)
    rank.live.buffers[name][3] += 1
    other = rank_with(0, None)
    other.live.buffers[name][3] += 1
    other.receive(0, list(other.pieces))
    comparison = other.sink.compare(Key(1, 0, 0))
    assert comparison.step(60) and (comparison.differing, comparison.first) == (1, name)


def test_the_plan_command_places_what_the_engine_places() -> None:
    assert isinstance(PLAN.pieces, PieceTable)
    for budget in ((dense_budget(), None), (dense_budget() // 2, None), (0, None), (ROOM, 0)):
        found = staging_of(PLAN.pieces, StagingBudget(*budget), 2)
        rank = rank_with(*budget)
        assert found.placements[1] == rank.sink.placement
        assert set(found.placements) == {layout.rank for layout in ENGINES}
