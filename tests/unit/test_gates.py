"""Gates that commit in parts, at the coordinator and in a rank's staging: what is ordered when, what failures do."""

from __future__ import annotations

from typing import Any

import pytest

from megastream.engine.parts import cut
from megastream.engine.settings import EngineSettings
from megastream.plan import build_plan
from megastream.plan.unit import experts_of
from megastream.protocol.mix import Mix, check_gate, mixed_versions
from megastream.protocol.part_records import GateSet, PartCommitted, SetGate, UnitsSealed
from megastream.protocol.records import Committed, Poisoned
from megastream.protocol.terms import ProtocolError
from tests.helpers.coordinator_bench import SETTINGS, STAGES, asked, bench, nothing_asked
from tests.helpers.spine import eventually
from tests.helpers.synthetic import FAMILY, engine_side, trainer_side


def test_a_stage_is_committed_when_sealed_everywhere_and_accepted_and_the_last_one_with_the_manifest() -> None:
    with bench(SETTINGS, "stage") as b:
        b.attach()
        b.live()
        b.part(1, STAGES["s0"])
        nothing_asked(b)
        b.accept(1)
        request = asked(b)
        assert (request.units, request.label) == (STAGES["s0"], "0..1+2")
        assert request.mix.vector() == {**dict.fromkeys(STAGES["s0"], 1), **dict.fromkeys(STAGES["s1"], 0)}
        assert b.records(PartCommitted) == [], "nothing is said before all ranks replied"
        b.core.answer()
        eventually(lambda: [r.label for r in b.records(PartCommitted)] == ["0..1+2"])
        b.part(1, STAGES["s1"])
        nothing_asked(b)
        b.version(1)
        assert (set(asked(b).units), asked(b).label) == (set(STAGES["s1"]), "1")
        b.core.answer()
        eventually(lambda: [r.version for r in b.records(Committed)] == [1])


def test_a_complete_version_overtakes_one_that_is_live_in_part_and_writes_every_unit() -> None:
    with bench(SETTINGS, "stage") as b:
        b.attach()
        b.live()
        b.part(1, STAGES["s0"])
        b.accept(1)
        asked(b)
        b.part(2, STAGES["s0"])
        b.version(2)
        b.core.answer()
        assert (asked(b).units, asked(b).label) == (None, "2")
        b.core.answer()
        b.version(1)
        b.part(1, STAGES["s1"])
        nothing_asked(b)


def test_a_part_that_failed_poisons_and_only_a_whole_version_follows() -> None:
    with bench(SETTINGS, "stage") as b:
        b.attach()
        b.live()
        b.part(1, STAGES["s0"])
        b.accept(1)
        asked(b)
        b.core.answer(ok=False)
        eventually(lambda: len(b.records(Poisoned)) == len(b.core.poisons) == 1)
        assert b.records(Poisoned)[0].part, "the version itself, whole, still comes"
        b.part(1, STAGES["s1"])
        nothing_asked(b)
        b.version(1)
        assert (asked(b).units, asked(b).label) == (None, "1")


def test_the_coldest_units_go_first_and_those_in_use_with_the_version() -> None:
    experts = ("s0.l0.e0:2", "s1.l1.e0:2")
    with bench(EngineSettings(early_units=1, poll_s=0.02), "idle_experts") as b:
        b.attach()
        b.live()
        b.core.use = {experts[0]: 0.5, experts[1]: 0.25}
        for unit in experts:
            b.part(1, (unit,))
        b.accept(1)
        assert asked(b).units == (experts[1],), "the coldest one"
        b.core.answer()
        assert (asked(b).units, asked(b).label) == ((experts[0],), "0..1+2")
        b.core.answer()
        b.version(1)
        asked(b)
        b.core.answer()
        b.core.use = {experts[0]: 1.0, experts[1]: 7.0}
        for unit in experts:
            b.part(2, (unit,))
        b.accept(2)
        nothing_asked(b)
        assert [op for op, _ in b.core.called].count("expert_use") == 2, "asked once for each version"


def test_a_version_that_the_ranks_cut_for_different_gates_is_committed_whole() -> None:
    """Its first piece came before the gate was switched on one rank, and after on the other."""
    with bench(SETTINGS, "idle_experts") as b:
        b.attach()
        b.live()
        b.core.use = {"s0.l0.e0:2": 0.0}
        name = {"attachment": "i1", "incarnation": 1, "version": 1, "attempt": 0, "plan_digest": "digest"}
        b.post(UnitsSealed(**name, rank=0, units=STAGES["s0"]), UnitsSealed(**name, rank=1, units=("s0.l0.e0:2",)))
        b.accept(1)
        nothing_asked(b)
        b.version(1)
        assert asked(b).units is None


def test_the_gate_is_switched_at_run_time_or_refused_with_the_reason_of_a_rank() -> None:
    with bench(SETTINGS) as b:
        b.attach()
        b.live()
        b.post(SetGate(engine="another", gate="stage", request="r0"), SetGate(engine="e", gate="stage", request="r1"))
        eventually(lambda: [(r.request, r.gate, r.error) for r in b.records(GateSet)] == [("r1", "stage", "")])
        b.part(1, STAGES["s0"])
        b.accept(1)
        asked(b)
        b.core.errors["gate"] = "engine rank 1 does not count"
        b.post(SetGate(engine="e", gate="idle_experts", request="r2"))
        eventually(lambda: len(b.records(GateSet)) == 2)
        assert b.records(GateSet)[1].gate == "stage" and "rank 1 does not count" in b.records(GateSet)[1].error
        assert b.core.called[-1] == ("gate", {"gate": "stage"}), "ranks that took the new one go back"


def test_requests_for_a_gate_are_answered_one_behind_the_other() -> None:
    """The first one's ranks go back to the old gate before the second one is asked: they end at what was answered."""
    held: list[tuple[str, Any]] = []
    with bench(SETTINGS) as b:
        b.core.call_ranks = lambda op, payload, done: held.append((payload["gate"], done))  # type: ignore[method-assign]
        b.post(SetGate(engine="e", gate="idle_experts", request="r1"), SetGate(engine="e", gate="stage", request="r2"))
        nothing = {"done": True, "error": ""}
        eventually(lambda: [gate for gate, _ in held] == ["idle_experts"])
        held[0][1](({"done": True, "error": "does not count"}, nothing))
        eventually(lambda: [gate for gate, _ in held] == ["idle_experts", "version"])
        assert b.records(GateSet) == []
        held[1][1]((nothing, nothing))
        eventually(lambda: [gate for gate, _ in held] == ["idle_experts", "version", "stage"])
        held[2][1]((nothing, nothing))
        eventually(lambda: [(r.request, r.gate) for r in b.records(GateSet)] == [("r1", "version"), ("r2", "stage")])


@pytest.mark.parametrize(("gate", "num_parts"), [("version", 1), ("stage", 2), ("idle_experts", 1 + 2 * 3)])
def test_a_rank_cuts_its_version_without_loss_or_overlap(gate: str, num_parts: int) -> None:
    """TP=2 + EP: each rank holds 3 of 6 experts of 3 layers, in units of 2 that do not fall together with the ranks."""
    plan = build_plan(
        trainer_side("tp1 pp2(2,1) ep2"), engine_side("tp2 ep2"), FAMILY,
        kind="stream", piece_bytes=4096, experts_per_unit=2, finality="pipelined",
    )  # fmt: skip
    for layout in engine_side("tp2 ep2"):
        parts = cut(plan.by_target[layout.rank], check_gate(gate))
        if gate != "idle_experts":
            assert len(parts) == num_parts
        assert sorted(unit for part in parts for unit in part.units) == sorted(
            unit for unit, rank in plan.elements if rank == layout.rank
        )
        sizes = {spec.name: spec.num_elements for spec in layout.buffers}
        written: dict[str, list[tuple[int, int]]] = {}
        for part in parts:
            for buffer in part.buffers:
                written.setdefault(buffer, []).extend(part.ranges.get(buffer, ((0, sizes[buffer]),)))
        assert written.keys() == sizes.keys() - set(layout.unused)
        for buffer, ranges in written.items():
            ends = [0, *(stop for _, stop in sorted(ranges))]
            assert [start for start, _ in sorted(ranges)] == ends[:-1] and ends[-1] == sizes[buffer]


def test_a_buffer_that_two_stages_fill_is_named() -> None:
    plan = build_plan(
        trainer_side("tp1 pp2(2,1) ep2"), engine_side("tp1"), FAMILY,
        kind="stream", piece_bytes=4096, experts_per_unit=2, finality="pipelined",
    )  # fmt: skip
    first, *rest = plan.by_target[0]
    other = next(piece for piece in rest if piece.unit[:2] != first.unit[:2])
    stray = type(first)(**{name: getattr(first, name) for name in first.__slots__} | {"unit": other.unit})
    with pytest.raises(
        ProtocolError, match=f"gate stage cannot be had with this plan: {first.copies[0].target_buffer}"
    ):
        cut((first, stray, *rest), "stage")


def test_labels_of_mixes_are_read_back() -> None:
    mix = Mix(6, 7, ("s0.embed",), ("s1.head", "s1.norm"))
    assert mix.label == "6..7+1" and mixed_versions(mix.label) == (6, 7)
    assert [mixed_versions(text) for text in ("7", "?", "6..7", "a6..7+1", "")] == [None] * 5
    assert experts_of("s1.l17.e32:40") == (17, range(32, 40)) and experts_of("s1.l17.dense") is None
    with pytest.raises(ValueError, match="attach with kind whole"):
        check_gate("pause")
