"""What a plan refuses, and that each guard fires: names, shapes, dtypes, duplicates, gaps, and a planner gone wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest

from megastream.layout.box import Box
from megastream.layout.engine import EngineParam, engine_rank_layout
from megastream.layout.shard import BufferSpec, RankLayout, Shard, TensorSpec
from megastream.layout.trainer import TrainerParam, trainer_rank_layout
from megastream.plan import CoverageError, prove_coverage
from megastream.plan.check import overlap
from megastream.plan.types import Piece
from tests.helpers.edits import replace
from tests.helpers.layout_reference import Model, config
from tests.helpers.layout_world import World, make_world

SMALL = dict(num_hidden_layers=2, num_experts=4, hidden_size=16, vocab_size=70, moe_intermediate_size=6)
TP1 = {"tp": 0, "tp_size": 1, "etp": 0, "etp_size": 1, "pp": 0, "ep": 0}
DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


@cache
def _world() -> World:
    return make_world(Model(config(**SMALL)), "ep2", "tp2", trainer_stages=(2,), engine_stages=(2,), bucket=400)


def world() -> World:
    return copy.deepcopy(_world())


def edit(layout: RankLayout, name: str, change: Callable) -> RankLayout:
    """The layout with every shard of a tensor replaced by what `change` returns for it (a list)."""
    shards = [new for shard in layout.shards for new in (change(shard) if shard.tensor == name else [shard])]
    return replace(layout, shards=tuple(shards))


def respec(layout: RankLayout, name: str, **changes: object) -> RankLayout:
    tensors = tuple(replace(spec, **changes) if spec.name == name else spec for spec in layout.tensors)
    return replace(layout, tensors=tensors)


def describe(param: TrainerParam, size: int = 10_000) -> RankLayout:
    model = Model(config(**SMALL))
    buffers = [BufferSpec("b", size, "float32")]
    return trainer_rank_layout(
        model.family, model.shape, rank=3, world_size=4, coords=TP1, params=[param], buffers=buffers
    )


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (TrainerParam("decoder.layers.1.mlp.mystery.weight", (4,), "b", 0), ("mlp.mystery.weight", "no rule")),
        (TrainerParam("decoder.layers.2.input_layernorm.weight", (16,), "b", 0), ("layers.2.", "layer 2", "2 layers")),
        (
            TrainerParam("decoder.layers.0.mlp.experts.local_experts.4.linear_fc2.weight", (16, 6), "b", 0),
            ("local_experts.4", "expert 4", "4 experts"),
        ),
        # N01 d: another shape of the same element count
        (
            TrainerParam("decoder.layers.0.mlp.router.weight", (16, 4), "b", 0),
            ("router", "rank 3", "(16, 4)", "(4, 16)"),
        ),
        (TrainerParam("decoder.layers.0.mlp.router.weight", (4, 16), "c", 0), ("router", "buffer c")),
        (TrainerParam("decoder.layers.0.mlp.router.weight", (4, 16), "b", 9_950), ("router", "10014", "10000")),
    ],
)
def test_trainer_parameters_are_refused_by_name(param: TrainerParam, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        describe(param)
    assert all(word in str(error.value) for word in words), error.value


def test_engine_parameters_are_refused_by_name() -> None:
    """CPU padding turns w13 [4, 12, 16] into [4, 64, 16]; an unknown buffer has no rule."""
    model = Model(config(**SMALL))
    cases = (
        (
            "model.layers.0.mlp.experts.routed_experts.w13_weight",
            (4, 64, 16),
            (0, 1, 2, 3),
            "cannot be written in place",
        ),
        ("model.layers.0.self_attn.attn.new_scale", (1,), None, "no rule"),
        ("model.layers.0.mlp.experts.routed_experts.w2_weight", (4, 16, 6), None, "global expert of every slot"),
    )
    for name, shape, experts, words in cases:
        with pytest.raises(ValueError, match=name) as error:
            engine_rank_layout(
                model.family,
                model.shape,
                rank=0,
                world_size=1,
                coords=TP1,
                params=[EngineParam(name, shape, "float32", experts)],
            )
        assert words in str(error.value)


def test_parameters_given_twice_are_refused() -> None:
    """N01 c, and the local and Transformer Engine names of one tensor side by side."""
    model = Model(config(**SMALL))
    buffers = [BufferSpec("b", 100, "float32")]
    name = "decoder.layers.0.input_layernorm.weight"
    common = dict(rank=0, world_size=2, coords=TP1, buffers=buffers)
    same = [TrainerParam(name, (16,), "b", 0), TrainerParam(name, (16,), "b", 16)]
    with pytest.raises(ValueError, match=f"{name} is given twice"):
        trainer_rank_layout(model.family, model.shape, params=same, **common)
    other = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    two_names = [same[0], TrainerParam(other, (16,), "b", 16)]
    both = trainer_rank_layout(model.family, model.shape, params=two_names, **common)
    plant = world()
    plant.trainer[0] = replace(
        plant.trainer[0],
        shards=(*plant.trainer[0].shards, *(replace(shard, buffer="d0") for shard in both.shards[1:])),
    )
    with pytest.raises(ValueError, match=r"model.layers.0.input_layernorm.weight: trainer rank 0 holds .* twice"):
        plant.plan()


def test_local_layer_names_are_refused_with_the_colliding_name() -> None:
    """L14: both stages call their first layer 0."""
    plant = make_world(Model(config(**SMALL)), "pp2", "tp1", trainer_stages=(1, 1), engine_stages=(2,))
    renamed = [replace(spec, name=spec.name.replace("layers.1.", "layers.0.")) for spec in plant.trainer[1].tensors]
    shards = [
        replace(shard, tensor=shard.tensor.replace("layers.1.", "layers.0.")) for shard in plant.trainer[1].shards
    ]
    plant.trainer[1] = replace(plant.trainer[1], tensors=tuple(renamed), shards=tuple(shards))
    with pytest.raises(ValueError, match=r"model.layers.0.* stages 0 and 1 .*global layer indices"):
        plant.plan()


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_missing_shard_is_refused_by_name(side: str) -> None:
    """N01 b, half of a tensor: the rank still describes the tensor."""
    plant = world()
    layouts = getattr(plant, side)
    layouts[:] = [edit(layout, DOWN, lambda shard: []) if layout.rank == 1 else layout for layout in layouts]
    with pytest.raises(ValueError, match=DOWN) as error:
        plant.plan()
    assert ("no trainer rank holds" if side == "trainer" else "hold all but 48 of 96") in str(error.value)


def test_tensors_of_one_side_only_are_listed() -> None:
    """N01 a and b: nothing is skipped to tolerate extras."""
    plant = world()
    extra = TensorSpec("model.layers.0.mlp.experts.3.up_proj.weight", (6, 16), "float32")
    plant.trainer = [
        edit(replace(item, tensors=tuple(s for s in item.tensors if s.name != extra.name)), extra.name, lambda _: [])
        for item in plant.trainer
    ]
    with pytest.raises(ValueError, match=f"1 tensors are held by the engine, not the trainer: {extra.name}"):
        plant.plan()


def test_wrong_numbers_are_refused_by_name() -> None:
    """Shapes that differ between ranks, boxes outside the tensor, shards outside the buffer, missing ranks."""
    cases: list[tuple[Callable[[World], None], str]] = [
        (
            lambda w: w.trainer.__setitem__(1, respec(w.trainer[1], "model.norm.weight", shape=(32,))),
            "model.norm.weight",
        ),
        (
            lambda w: w.engine.__setitem__(
                0, edit(w.engine[0], DOWN, lambda s: [replace(s, box=Box((0, 4), (16, 7)))])
            ),
            f"{DOWN}.*engine rank 0",
        ),
        (lambda w: w.engine.__setitem__(0, edit(w.engine[0], DOWN, lambda s: [replace(s, offset=10**6)])), DOWN),
        (
            lambda w: w.engine.__setitem__(0, edit(w.engine[0], DOWN, lambda s: [replace(s, offset=-5)])),
            f"{DOWN}: shard on engine rank 0 starts at element -5 of buffer .*, which begins at 0",
        ),
        *(
            (
                lambda w, strides=strides: w.engine.__setitem__(
                    0, edit(w.engine[0], DOWN, lambda s: [replace(s, strides=strides)])
                ),
                f"{DOWN}: shard on engine rank 0 has strides .*; each of its 2 dims needs one of at least 1",
            )
            for strides in ((0, 1), (-8, 1), (1,))
        ),
        (lambda w: w.trainer.pop(), r"trainer layouts are of ranks \[0\] of 2"),
        (lambda w: w.engine.append(w.engine[0]), r"engine layouts are of ranks \[0, 0, 1\] of 2"),
        (lambda w: w.engine.__setitem__(0, replace(w.engine[0], side="trainer")), "trainer rank 0 was given"),
    ]
    for change, words in cases:
        plant = world()
        change(plant)
        with pytest.raises(ValueError, match=words):
            plant.plan()


def test_engine_buffers_are_filled_once_and_whole() -> None:
    """A rule that lays v over k, or one that leaves a hole, is refused before the plan is cut."""
    qkv, v = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    plant = world()
    plant.engine[0] = edit(plant.engine[0], v, lambda s: [replace(s, offset=s.offset - 16)])
    with pytest.raises(ValueError, match=f"{qkv} on engine rank 0: .*v_proj.weight overlaps .*k_proj.weight"):
        plant.plan()
    plant = world()
    buffers = [replace(b, num_elements=b.num_elements + 16) if b.name == qkv else b for b in plant.engine[0].buffers]
    plant.engine[0] = replace(plant.engine[0], buffers=tuple(buffers))
    with pytest.raises(ValueError, match=f"{qkv} on engine rank 0 has 976 elements, its shards fill 960"):
        plant.plan()


def test_interleaved_shards_are_told_from_overlapping_ones() -> None:
    """Two tensors may share a span of a buffer column by column (alternating gate and up rows, transposed)."""
    shards = [Shard(name, Box((0, 0), (3, 2)), 0, "b", at, (4, 2)) for name, at in (("even", 0), ("odd", 1))]
    assert overlap(shards) is None
    clash = replace(shards[1], strides=(4, 1))
    assert overlap([shards[0], clash]) == (shards[0], clash)


@pytest.mark.parametrize(("source", "target", "ok"), [("float32", "bfloat16", True), ("bfloat16", "float16", False)])
def test_dtypes(source: str, target: str, ok: bool) -> None:
    """N01 e: a cast happens at the source if it keeps the meaning; anything else is refused by name."""
    plant = world()
    for layouts, dtype in ((plant.trainer, source), (plant.engine, target)):
        layouts[:] = [
            replace(item, buffers=tuple(replace(spec, dtype=dtype) for spec in item.buffers)) for item in layouts
        ]
    if ok:
        plan = plant.plan()
        assert {(piece.dtype, piece.transform) for piece in plan.pieces} == {(target, "cast")}
        assert plan.payload_bytes == 2 * sum(plan.elements.values())
    else:
        with pytest.raises(ValueError, match=r"model\..*: the trainer holds bfloat16, the engine float16"):
            plant.plan()


def _drop(pieces: list[Piece]) -> None:
    pieces[3] = replace(pieces[3], copies=pieces[3].copies[1:])


def _repeat(pieces: list[Piece]) -> None:
    pieces.append(pieces[3])


def _shift_source(pieces: list[Piece]) -> None:
    first, *rest = pieces[3].copies
    pieces[3] = replace(pieces[3], copies=(replace(first, source_offset=first.source_offset + 1), *rest))


def _shift_source_row(pieces: list[Piece]) -> None:
    first, *rest = pieces[3].copies
    row = first.source_offset + first.source_strides[0]
    pieces[3] = replace(pieces[3], copies=(replace(first, source_offset=row), *rest))


def _other_rank(pieces: list[Piece]) -> None:
    pieces[3] = replace(pieces[3], source=1 - pieces[3].source)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_drop, "of .* elements"),
        (_repeat, "elements twice"),
        (_shift_source, "trainer rank 0 has none of that tensor"),
        (_shift_source_row, "from trainer rank 0 and writes it as"),
        (_other_rank, "from trainer rank|has none of that tensor"),
    ],
)
def test_the_proof_fires(fault: Callable[[list[Piece]], None], words: str) -> None:
    """The proof reads finished pieces: each planted fault is found, with the tensor's name."""
    plant = world()
    pieces = list(plant.plan(piece_bytes=200).pieces)
    prove_coverage(pieces, plant.trainer, plant.engine)
    name = pieces[3].copies[0].tensor
    fault(pieces)
    with pytest.raises(CoverageError, match=words) as error:
        prove_coverage(pieces, plant.trainer, plant.engine)
    assert name in str(error.value)
