"""A rank's staging under each gate: what is said when, which bytes a part makes live, what stays after a failure."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from megastream.engine.parts import cut
from megastream.plan.unit import experts_of
from megastream.protocol.mix import Gate
from megastream.protocol.staging import Key
from tests.helpers.plans import header_of
from tests.helpers.staged_rank import TERM, Rank

IS_EARLY: dict[str, Any] = {
    "stage": lambda unit: unit.startswith("s0"),
    "idle_experts": lambda unit: experts_of(unit) is not None,
}


@pytest.mark.parametrize("gate", ["stage", "idle_experts"])
def test_a_part_is_live_before_the_rest_has_arrived(gate: Gate) -> None:
    rank = Rank(gate)
    early = tuple(sorted(filter(IS_EARLY[gate], rank.units())))
    behind = tuple(sorted(rank.units() - set(early)))
    assert early and behind
    rank.receive(1, [piece for piece in rank.pieces if piece.unit in early])
    assert {unit for _, units in rank.said for unit in units} == set(early)
    assert len(rank.said) == {"stage": 1, "idle_experts": len(early)}[gate], "each part once"
    assert rank.commit(1, early, behind) == ""
    changed, unchanged = rank.tensors_not_of(0), rank.tensors_not_of(1)
    assert changed == {c.tensor for piece in rank.pieces for c in piece.copies if piece.unit in early}
    assert unchanged == {c.tensor for piece in rank.pieces for c in piece.copies if piece.unit in behind}
    assert "not prepared here: units" in rank.commit(1, behind)
    assert rank.tensors_not_of(1) == unchanged, "nothing is written unless all of it is there"
    rank.receive(1, [piece for piece in rank.pieces if piece.unit in behind])
    elements = sum(piece.num_elements for piece in rank.pieces)
    assert rank.said[-1] == (1, elements) and [entry for entry in rank.said if entry == (1, elements)] == rank.said[-1:]
    assert rank.commit(1, behind) == "" and rank.tensors_not_of(1) == set()
    assert rank.sink._table.staged == () and not rank.sink._staged, "its staging is free again"


def test_a_rank_that_holds_one_stage_says_that_it_is_sealed() -> None:
    """Others may hold the rest: with pipeline stages on both sides, no rank holds more than one."""
    rank = Rank("stage")
    only = [piece for piece in rank.pieces if IS_EARLY["stage"](piece.unit)]
    rank.sink._parts = cut(only, "stage")
    assert len(rank.sink._parts) == 1
    rank.receive(1, only)
    assert rank.said == [(1, frozenset(piece.unit for piece in only)), (1, sum(piece.num_elements for piece in only))]


def test_under_gate_version_nothing_is_said_before_everything_is_here() -> None:
    rank = Rank("version")
    rank.receive(1, list(rank.pieces[:-1]))
    assert rank.said == [] and "not prepared" in rank.commit(1, None)
    rank.receive(1, list(rank.pieces[-1:]))
    assert len(rank.said) == 1 and rank.commit(1, None) == "" and rank.tensors_not_of(1) == set()


def test_units_that_were_prepared_together_are_not_committed_apart() -> None:
    rank = Rank("stage")
    rank.receive(1, list(rank.pieces))
    one = min(rank.units())
    assert "prepared together, not one by one" in rank.commit(1, (one,), ("others",))
    assert rank.tensors_not_of(0) == set()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_copy_that_fails_is_made_again_once(failures: int) -> None:
    rank = Rank("stage")
    rank.receive(1, list(rank.pieces))
    early = tuple(filter(IS_EARLY["stage"], rank.units()))
    rank.live.break_commits = failures
    assert rank.commit(1, early, ("others",)) == ("" if failures == 1 else "RuntimeError: injected: the copy failed")
    assert rank.commit(1, None) == "" and rank.tensors_not_of(1) == set(), "and all of it from staging afterwards"


def test_what_may_be_committed_stays_when_the_attachment_ends() -> None:
    """The commit of a part can be under way; a version of which no part is sealed goes."""
    rank = Rank("stage")
    early = tuple(filter(IS_EARLY["stage"], rank.units()))
    rank.receive(1, [piece for piece in rank.pieces if piece.unit in early])
    rank.receive(2, list(rank.pieces[:1]))
    rank.sink.end("a lane broke")
    assert rank.sink._table.staged == (Key(1, 1, 0),)
    assert rank.commit(1, early, ("others",)) == ""


def test_a_part_that_others_hold_needs_nothing_here() -> None:
    """With pipeline stages on both sides a rank has received nothing yet when the other one's stage becomes live."""
    rank = Rank("stage")
    assert rank.commit(1, ("others",), tuple(rank.units())) == ""
    rank.receive(1, list(rank.pieces))
    assert rank.commit(1, tuple(rank.units()), ("more",)) == "" and rank.sink._table.staged == (Key(1, 1, 0),)
    assert rank.commit(1, ("more",)) == "" and rank.sink._table.staged == ()


def test_what_was_taken_back_is_forgotten_although_a_part_of_it_is_live() -> None:
    rank = Rank("stage")
    early = tuple(filter(IS_EARLY["stage"], rank.units()))
    rank.receive(1, [piece for piece in rank.pieces if piece.unit in early])
    assert rank.commit(1, early, ("others",)) == "" and rank.sink._table.staged == (Key(1, 1, 0),)
    rank.sink.withdrawn(1, 0)
    assert rank.sink._table.staged == () and len(rank.sink._table.free_slots) == 2 and not rank.sink._staged
    late = next(piece for piece in rank.pieces if piece.unit not in early)
    assert not rank.sink.admit(header_of(late, 1, 0, TERM), late.source), "what still comes of it is thrown away"
    rank.receive(2, list(rank.pieces))
    assert rank.commit(2, None) == "" and rank.tensors_not_of(2) == set()


def test_another_gate_holds_for_the_versions_that_come() -> None:
    rank = Rank("version")
    rank.receive(1, list(rank.pieces[:1]))
    rank.sink.choose("stage")
    rank.receive(1, list(rank.pieces[1:]))
    assert [version for version, _ in rank.said] == [1]
    assert rank.commit(1, None) == ""
    rank.receive(2, list(rank.pieces))
    assert [version for version, _ in rank.said] == [1, 2, 2, 2], "two stages, then the whole"


def test_no_commit_waits_until_staging_is_allocated_for_the_next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set is made when the first piece of a version needs it: gigabytes of zeros, page-locked, on a lane's thread."""
    rank, allocates, goes_on = Rank("version"), threading.Event(), threading.Event()
    rank.receive(1, list(rank.pieces))
    honest = rank.sink._memory._allocate

    def slowly(name: str) -> torch.Tensor:
        allocates.set()
        assert goes_on.wait(20)
        return honest(name)

    monkeypatch.setattr(rank.sink._memory, "_allocate", slowly)
    errors: list[str] = []
    halves = (rank.pieces[::2], rank.pieces[1::2])
    lanes = [threading.Thread(target=rank.receive, args=(2, list(half))) for half in halves]
    worker = threading.Thread(target=lambda: errors.append(rank.commit(1, None)))
    for lane in lanes:
        lane.start()
    assert allocates.wait(10)
    worker.start()
    worker.join(10)
    try:
        assert errors == [""], "the commit waits"
    finally:
        goes_on.set()
    for lane in lanes:
        lane.join(10)
    assert rank.commit(2, None) == "" and rank.tensors_not_of(2) == set(), "both lanes wrote into one set"


def test_a_gate_changes_under_the_lock_under_which_pieces_are_admitted() -> None:
    """Otherwise a version could be cut for one gate and be told to become live as the other one says."""
    rank = Rank("version")
    host = threading.Thread(target=rank.sink.choose, args=("stage",))
    with rank.sink._changed:
        host.start()
        host.join(0.2)
        assert (rank.sink._gate, len(rank.sink._parts)) == ("version", 1)
    host.join(10)
    assert (rank.sink._gate, len(rank.sink._parts)) == ("stage", 2)


def test_a_version_is_said_to_be_sealed_behind_its_parts_whichever_lane_is_faster() -> None:
    rank, first, whole = Rank("stage"), threading.Event(), threading.Event()
    early = [piece for piece in rank.pieces if IS_EARLY["stage"](piece.unit)]
    honest = rank.sink._units_sealed

    def slowly(key: Key, units: frozenset[str]) -> None:
        if not first.is_set():
            first.set()
            whole.wait(0.5)  # for what must not come
        honest(key, units)

    def sealed(key: Key, elements: int, prepare_s: float) -> None:
        rank.said.append("sealed")
        whole.set()

    rank.sink._units_sealed, rank.sink._sealed = slowly, sealed
    lane = threading.Thread(target=rank.receive, args=(1, early))
    lane.start()
    assert first.wait(10)
    rank.receive(1, [piece for piece in rank.pieces if piece not in early])
    lane.join(10)
    assert len(rank.said) == 3 and rank.said[-1] == "sealed"
