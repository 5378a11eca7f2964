"""Overlays of a live version: their plan, their terms, who may put them there; what the log says of engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megastream.engine.parts import cut
from megastream.families import family_of, load_shape
from megastream.families.shipped import shape_of_model
from megastream.layout.only import only
from megastream.layout.shard import RankLayout
from megastream.plan import build_plan
from megastream.plan.types import Plan
from megastream.protocol.commit import CommitTable
from megastream.protocol.engines import engines_of
from megastream.protocol.journal import Journal
from megastream.protocol.part_records import PartCommitted
from megastream.protocol.records import (
    Accepted,
    Attached,
    Bound,
    Committed,
    Detached,
    EngineReady,
    Failed,
    LanesOpen,
    Poisoned,
    Record,
    Sealed,
    WeightsReady,
)
from megastream.protocol.terms import ProtocolError, check_terms
from megastream.trainer.checkpoint_experts import CheckpointExperts, expert_tensors
from tests.helpers.coordinator_bench import Bench, asked, bench
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import TERMS, attach_record
from tests.helpers.spine import eventually
from tests.helpers.swapped import EXPERT, NAMES, UNIT, write
from tests.helpers.synthetic import CONFIG, FAMILY, SHAPE, engine_side


def plan_of(held: RankLayout, engine: tuple[RankLayout, ...], **changes: Any) -> Plan:
    options: dict[str, Any] = dict(kind="stream", piece_bytes=4096, experts_per_unit=1, finality="whole", overlay=True)
    theirs = [only(layout, NAMES) for layout in engine]
    return build_plan([held], theirs, FAMILY, **{**options, **changes})


@pytest.mark.parametrize(("mesh", "holders"), [("tp1 pp2", 1), ("tp2", 2), ("tp2 ep2", 1), ("tp1 pp3", 1)])
def test_the_plan_of_an_expert_is_its_elements_on_the_ranks_that_hold_it(
    mesh: str, holders: int, tmp_path: Path
) -> None:
    part, engine = CheckpointExperts(write(tmp_path / "c"), [EXPERT]).describe(), engine_side(mesh)
    plan = plan_of(part, engine)
    held = {layout.rank: sum(shard.box.volume for shard in layout.shards if shard.tensor in NAMES) for layout in engine}
    assert plan.units == (UNIT,)
    assert plan.elements == {(UNIT, rank): volume for rank, volume in held.items() if volume}
    assert len(plan.elements) == holders
    for rank in held:
        assert build_rank(part, engine, rank).digest == plan.digest, "a rank without any of it builds the same plan"


def build_rank(part: RankLayout, engine: tuple[RankLayout, ...], rank: int) -> Plan:
    return plan_of(part, engine, own=("engine", rank))


def test_without_the_word_some_tensors_are_no_model(tmp_path: Path) -> None:
    part, engine = CheckpointExperts(write(tmp_path / "c"), [EXPERT]).describe(), engine_side("tp1")
    with pytest.raises(ValueError, match="held by the engine, not the trainer"):
        build_plan([part], engine, FAMILY, kind="stream", piece_bytes=1, experts_per_unit=1, finality="whole")
    with pytest.raises(ValueError, match="w13_weight on engine rank 0 has .* elements, its shards fill"):
        plan_of(part, engine, overlay=False)


def test_only_the_rows_of_the_expert_become_live(tmp_path: Path) -> None:
    part, (layout,) = CheckpointExperts(write(tmp_path / "c"), [EXPERT]).describe(), engine_side("tp1")
    pieces = plan_of(part, (layout,)).by_target[0]
    sizes = {spec.name: spec.num_elements for spec in layout.buffers}
    for gate in ("version", "stage", "idle_experts"):
        (cut_,) = cut(pieces, gate, shared=True)  # type: ignore[arg-type]
        for buffer in cut_.buffers:
            expert = sizes[buffer] // SHAPE.num_experts
            assert cut_.ranges[buffer] == ((4 * expert, 5 * expert),)
    assert cut(pieces, "version")[0].ranges == {}, "taken for the whole buffer, it would write the other experts too"


@pytest.mark.parametrize(
    ("layer", "expert", "words"),
    [
        (3, 0, "layer 3 is not in this qwen3_moe, whose layers are 0 to 2"),
        (-1, 0, "layer -1 is not"),
        (1, 6, "expert 6 is not in layer 1, whose experts are 0 to 5"),
        (0, 0, "has no tensor model.layers.0.mlp.experts.0.gate_proj.weight"),
    ],
)
def test_an_expert_that_is_not_there_is_named(layer: int, expert: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        CheckpointExperts(write(tmp_path / "c"), [(layer, expert)])


def test_layers_without_experts_and_stacked_ones_are_named(tmp_path: Path) -> None:
    dense, stacked = (replace(shape_of_model(name), num_layers=5) for name in ("DeepSeek-V3", "GPT-OSS-120B"))
    with pytest.raises(ValueError, match="layer 0 of this deepseek_v3 has no experts; layers 3 to 4 have some"):
        expert_tensors(family_of(dense), dense, [(0, 0)])
    with pytest.raises(ValueError, match="holds all experts of a layer in one tensor"):
        expert_tensors(family_of(stacked), stacked, [(0, 0)])
    llama = load_shape({**CONFIG, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    with pytest.raises(ValueError, match="this qwen3 has no experts"):
        expert_tensors(family_of(llama), llama, [(0, 0)])
    with pytest.raises(ValueError, match=r"is no Hugging Face checkpoint: config\.json: No such file"):
        CheckpointExperts(tmp_path, [EXPERT])


def test_an_expert_of_another_size_is_refused_before_a_byte_moves(tmp_path: Path) -> None:
    config = {**CONFIG, "moe_intermediate_size": 32}
    shape = load_shape(config)
    specs = expert_tensors(FAMILY, shape, [EXPERT])
    part = CheckpointExperts(write(tmp_path / "c"), [EXPERT]).describe()
    with pytest.raises(ValueError, match=r"gate_proj.weight: engine rank 0 says \(16, 32\), another rank \(32, 32\)"):
        plan_of(replace(part, tensors=tuple(specs), shards=()), engine_side("tp1"))


@pytest.mark.parametrize("changes", [{"over": 5}, {"over": 7}, {"over": 2, "kind": "whole"}, {"over": -2}])
def test_terms_of_an_overlay_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    check_terms(attach_record(1, 5, over=4))
    with pytest.raises(ProtocolError, match="is no overlay of version|over must be -1 to"):
        check_terms(attach_record(1, 5, **changes))


def test_a_rank_that_holds_nothing_of_a_version_has_nothing_to_seal() -> None:
    table, name = CommitTable(TERMS, 2, {UNIT: {1}}), dict(attachment="i1", incarnation=1, version=0, attempt=0)
    table.accepted(Accepted(**name, train_step=0))
    table.manifest(WeightsReady(**name, train_step=0, plan_digest="digest", units=(UNIT,), elements=5))
    assert table.next_commit() is None
    table.sealed(Sealed(**name, rank=1, plan_digest="digest", elements=5, prepare_s=0.0))
    assert table.next_commit() is not None


# ---- the coordinator


def put_over(b: Bench, over: int, *, incarnation: int = 2, base: int = 9) -> None:
    """All that an overlay needs to become live. Rank 0 holds nothing of it."""
    name = f"i{incarnation}"
    b.post(attach_record(incarnation, base, over=over))
    for rank, units in enumerate(((), (UNIT,))):
        b.post(Bound(attachment=name, side="engine", rank=rank, digest="digest", units=units))
    b.post(LanesOpen(attachment=name, digest="digest"))
    version = dict(attachment=name, incarnation=incarnation, version=base, attempt=0)
    b.post(Sealed(**version, rank=1, plan_digest="digest", elements=5, prepare_s=0.0))
    b.post(Accepted(**version, train_step=0))
    b.post(WeightsReady(**version, train_step=0, plan_digest="digest", units=(UNIT,), elements=5))


def test_an_overlay_is_put_over_the_live_version_without_a_comparison() -> None:
    with bench() as b:
        put_over(b, 0)
        request = asked(b)
        assert (request.version, request.over, request.units, request.mix) == (9, 0, None, None)
        assert b.core.called == [] and b.records(Committed) == []
        b.core.answer()
        b.live(2)
        assert b.records(Attached)[0].replaced and [r.version for r in b.records(Committed)] == [9]


def test_an_overlay_of_another_version_is_refused_by_name() -> None:
    with bench() as b:
        put_over(b, 3)
        eventually(lambda: bool(b.records(Detached)))
        assert "engine e serves version 0, and the overlay is for version 3" in b.records(Failed)[0].reason
        assert b.core.asked == []


def test_an_overlay_waits_for_no_attachment_and_ends_none() -> None:
    with bench() as b:
        b.attach()
        b.live()
        put_over(b, 0)
        eventually(lambda: bool(b.records(Detached)))
        assert b.records(Detached)[0].attachment == "i2"
        assert "engine e is attached to incarnation 1 (i1)" in b.records(Failed)[0].reason
        b.version(1)
        assert asked(b).version == 1


def test_an_overlay_heals_no_poisoned_engine() -> None:
    with bench() as b:
        put_over(b, 0)
        asked(b)
        b.core.answer(ok=False)
        eventually(lambda: bool(b.records(Poisoned)) and bool(b.records(Detached)))
        put_over(b, 9, incarnation=3, base=10)
        eventually(lambda: len(b.records(Detached)) == 2)
        assert "the engine is poisoned; a whole version has to come first" in b.records(Failed)[-1].reason
        b.attach(incarnation=4, base=11, differing=3)
        assert asked(b).over == -1
        b.core.answer()
        b.live(4)


def test_an_overlay_on_an_engine_ends_no_training_of_others_and_a_new_trainer_does() -> None:
    journal = Journal(MemoryLog(MemoryStore()), "trainer rank 0", 1)
    journal._take(attach_record(2, 5, over=4))
    assert journal.failure == ""
    journal._take(attach_record(3, 6))
    assert journal.failure == "superseded by incarnation 3"


# ---- the log


READY = [EngineReady(engine="e", rank=rank, world_size=2, library="x") for rank in range(2)]
COMMITTED = Committed(attachment="i1", incarnation=1, version=4, ranks=(), visible_unix_s=0.0)
PART = PartCommitted(
    attachment="i1", incarnation=1, version=5, units=("u",), label="4..5+1", ranks=(), visible_unix_s=0.0
)


@pytest.mark.parametrize(
    ("records", "live", "trouble", "attached"),
    [
        ([], 0, "", []),
        ([attach_record()], 0, "", ["i1"]),
        ([attach_record(), COMMITTED], 4, "", ["i1"]),
        ([attach_record(), COMMITTED, Detached(attachment="i1", engine="e")], 4, "", []),
        ([attach_record(), Failed(attachment="i1", side="trainer", rank=0, reason="gone")], 0, "", []),
        ([attach_record(), COMMITTED, PART], 4, "serves 4..5+1, units of two versions", ["i1"]),
        ([Poisoned(engine="e", version=4, reason="no")], 0, "is poisoned: no", []),
        ([attach_record(), PART, COMMITTED], 4, "", ["i1"]),
        ([COMMITTED], 4, "", ["i1"]),  # the Attach is forgotten
        ([COMMITTED, Detached(attachment="i1", engine="e")], 4, "", []),
        ([attach_record(engine="f"), COMMITTED], 0, "", []),
    ],
)
def test_what_the_log_says_of_an_engine(records: list[Record], live: int, trouble: str, attached: list[str]) -> None:
    state = engines_of([*READY, *records], {"i1": "e"}.__getitem__)["e"]
    assert state.is_up and not engines_of(READY[:1], str)["e"].is_up
    assert (state.live, state.trouble, list(state.attachments)) == (live, trouble, attached)
