"""Boxes, flat ranges, rules and bytes: the small parts that layouts are made of."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastream.layout.box import Box
from megastream.layout.pack import flat_boxes, row_major_strides
from megastream.layout.placing import Cut, Fused, Placed, window_shards
from megastream.layout.rules import (
    column,
    gated,
    latent,
    row,
    same,
    stack_first,
    stack_gated,
    stack_interleaved,
    vocab,
)
from megastream.layout.rules_attention import (
    concat_gated_qkv,
    concat_qkv,
    grouped_gated_qkv,
    grouped_qkv,
    groups,
    sections,
    ungrouped,
)
from megastream.layout.shard import TensorSpec
from megastream.layout.wire import decode_layout, encode_layout
from tests.helpers.edits import replace
from tests.helpers.layout_reference import Model, config
from tests.helpers.layout_world import make_world

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(data=st.data(), shape=shapes)
@settings(max_examples=150, deadline=None)
def test_a_flat_range_is_a_handful_of_boxes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = flat_boxes(shape, start, stop)
    numbers = np.arange(size).reshape(shape)
    found = np.concatenate([numbers[tuple(map(slice, b.lo, b.hi))].ravel() for b in boxes] or [np.empty(0)])
    assert found.tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def test_flat_ranges_outside_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[0, 7\) does not lie in an array of shape \(2, 3\)"):
        flat_boxes((2, 3), 0, 7)


@given(data=st.data(), shape=shapes)
@settings(max_examples=150, deadline=None)
def test_subtraction_leaves_each_other_element_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    def box() -> Box:
        spans = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
        return Box(tuple(a for a, _ in spans), tuple(b for _, b in spans))

    first, second = box(), box()
    count = np.zeros(shape, int)
    for part in first.subtract(second):
        count[tuple(map(slice, part.lo, part.hi))] += 1
    expected = np.zeros(shape, int)
    expected[tuple(map(slice, first.lo, first.hi))] = 1
    expected[tuple(map(slice, second.lo, second.hi))] = 0
    assert np.array_equal(count, expected)


def test_row_major_geometry() -> None:
    assert row_major_strides((2, 3, 5)) == (15, 5, 1)
    assert row_major_strides((7,)) == (1,)
    with pytest.raises(ValueError, match="not a box"):
        Box((0, 2), (1, 2))


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "bfloat16")


QKV = Fused((spec("q", 64, 48), spec("k", 16, 48), spec("v", 16, 48)), head_dim=8)


def test_grouped_qkv_begins_each_group_with_its_query_heads() -> None:
    """L01: 8 query heads, 2 groups: rows of q heads 0-3, k 0, v 0, q heads 4-7, k 1, v 1."""
    regions = grouped_qkv(QKV, Cut("tp", 0, 1)).regions
    found = [(r.tensor.name, r.box.lo[0], r.box.hi[0], r.origin[0]) for r in regions]
    assert found == [
        ("q", 0, 32, 0),
        ("k", 0, 8, 32),
        ("v", 0, 8, 40),
        ("q", 32, 64, 48),
        ("k", 8, 16, 80),
        ("v", 8, 16, 88),
    ]
    assert all(a.origin[0] + a.box.shape[0] == b.origin[0] for a, b in pairwise(regions))


def rows_of(placed: Placed) -> list[tuple[str, int, int]]:
    """(tensor, first row, end) of each region, which lie one behind the other."""
    at = [region.origin[0] for region in placed.regions]
    assert at == list(accumulate([r.box.shape[0] for r in placed.regions[:-1]], initial=0))
    return [(r.tensor.name, r.box.lo[0], r.box.hi[0]) for r in placed.regions]


GATED_QKV = replace(QKV, tensors=(spec("q", 128, 48), spec("k", 16, 48), spec("v", 16, 48)))


def test_gates_stand_behind_the_group_s_query_heads_or_each_behind_its_own() -> None:
    """8 query heads of 8 rows, each with 8 rows of gate, 2 groups: the second of two ranks has heads 4 to 7."""
    queries, gates = ([("q", 64 + 16 * head + at, 64 + 16 * head + at + 8) for head in range(4)] for at in (0, 8))
    trainer, engine = (rule(GATED_QKV, Cut("tp", 1, 2)) for rule in (grouped_gated_qkv, concat_gated_qkv))
    assert rows_of(trainer) == [*queries, *gates, ("k", 8, 16), ("v", 8, 16)]
    assert rows_of(engine) == [("q", 64, 128), ("k", 8, 16), ("v", 8, 16)]
    assert trainer.shape == engine.shape == (80, 48)


def test_groups_are_taken_apart_or_stay_together() -> None:
    """4 groups, each 2 rows of q, 1 of k, 3 of v; in a second tensor one of b and one of a. The second of two ranks."""
    tensors, parts = (spec("qkv", 24, 5), spec("ba", 8, 5)), ((2, 1, 3), (1, 1))
    apart = ungrouped(Fused(tensors, parts=parts), Cut("tp", 1, 2))
    assert rows_of(apart) == [
        *[("qkv", 12, 14), ("qkv", 18, 20), ("qkv", 14, 15), ("qkv", 20, 21), ("qkv", 15, 18), ("qkv", 21, 24)],
        *[("ba", 4, 5), ("ba", 6, 7), ("ba", 5, 6), ("ba", 7, 8)],
    ]
    assert rows_of(groups(Fused(tensors[:1], parts=parts[:1]), Cut("tp", 1, 2))) == [("qkv", 12, 24)]


def test_sections_are_cut_each_for_itself() -> None:
    fused = Fused((spec("conv", 16, 1, 4),), parts=((4, 4, 8),))
    assert rows_of(sections(fused, Cut("tp", 1, 2))) == [("conv", 2, 4), ("conv", 6, 8), ("conv", 12, 16)]


def test_gate_and_up_in_turns_become_two_halves() -> None:
    """L07: expert 1 of [2 experts, 3 in, 4 ffn, gate or up]; the second of two ranks has ffn 2 and 3."""
    fused = Fused((spec("gate_up", 2, 3, 4, 2),), expert=1)
    stored = np.arange(48).reshape(2, 3, 8)
    for rule, expected in (
        (stack_gated, [[[24 + 8 * i + 2 * f + half for i in range(3)] for f in (2, 3)] for half in (0, 1)]),
        (stack_interleaved, [[[24 + 8 * i + 2 * f + half for i in range(3)] for half in (0, 1)] for f in (2, 3)]),
    ):
        placed = rule(fused, Cut("tp", 1, 2))
        (region,) = placed.regions
        box = stored.reshape(2, 3, 4, 2)[tuple(map(slice, region.box.lo, region.box.hi))]
        assert (
            box.transpose(np.argsort(region.dims)).reshape(placed.shape).tolist() == np.concatenate(expected).tolist()
        )
        assert placed.shape == (4, 3) and prod(placed.grid) == 12


@pytest.mark.parametrize("rule", [stack_gated, stack_interleaved])
def test_a_stored_window_is_filled_once_wherever_it_is_cut(rule) -> None:
    """Every window of a parameter, also across gate and up, stored row by row or column by column behind 5 others."""
    tensor = np.arange(48).reshape(2, 3, 4, 2)
    halves = [tensor[1, :, :, half].T for half in (0, 1)]
    whole = np.concatenate(halves) if rule is stack_gated else np.stack(halves, axis=1).reshape(8, 3)
    placed = rule(Fused((spec("gate_up", 2, 3, 4, 2),), expert=1), Cut("tp", 0, 1))
    for (top, bottom), (left, right) in product(combinations(range(9), 2), combinations(range(4), 2)):
        window = whole[top:bottom, left:right]
        for order, strides in (("C", (right - left, 1)), ("F", (1, bottom - top))):
            flat = np.full(5 + window.size, -1)
            box = Box((top, left), (bottom, right))
            for _, shard in window_shards(placed, box, strides, rank=0, buffer="b", base=5):
                steps = [step * flat.itemsize for step in shard.strides]
                place = np.lib.stride_tricks.as_strided(flat[shard.offset :], shard.box.shape, steps)
                assert (place == -1).all()
                place[...] = tensor[tuple(map(slice, shard.box.lo, shard.box.hi))]
            assert flat[:5].tolist() == [-1] * 5 and flat[5:].tolist() == window.ravel(order).tolist()


def test_a_bias_behind_a_sum_is_the_first_rank_s() -> None:
    fused = Fused((spec("bias", 2, 3),), expert=1)
    assert [len(stack_first(fused, Cut("tp", rank, 2)).regions) for rank in (0, 1)] == [1, 0]


def test_a_latent_is_cut_or_whole_as_the_parameter_is() -> None:
    fused = Fused((spec("down", 12, 5),))
    assert [latent(replace(fused, padded_rows=rows), Cut("tp", 1, 2)).shape[0] for rows in (0, 12, 24)] == [12, 6, 12]


def test_one_tensor_cut_by_rows_is_the_same_under_three_rules() -> None:
    """`column` is `gated` of one tensor, and `vocab` without padding."""
    fused = Fused((spec("a", 12, 5),))
    for rank in range(3):
        cut = Cut("tp", rank, 3)
        placed = column(fused, cut)
        assert placed == gated(fused, cut) == vocab(fused, cut)
        assert placed.shape == (4, 5) and placed.regions[0].box == Box((4 * rank, 0), (4 * rank + 4, 5))
    assert vocab(replace(fused, padded_rows=32), Cut("tp", 3, 4)).regions == ()


@pytest.mark.parametrize(
    ("rule", "fused", "size", "words"),
    [
        (gated, Fused((spec("gate", 20, 8), spec("up", 20, 8))), 3, "rows of gate: 20 does not divide by tp=3"),
        (row, Fused((spec("down", 8, 20),)), 8, "columns of down: 20 does not divide by tp=8"),
        (concat_qkv, QKV, 3, "query heads of q: 8 does not divide by tp=3"),
        (
            concat_qkv,
            replace(QKV, tensors=(spec("q", 96, 48), spec("k", 16, 48), spec("v", 16, 48))),
            3,
            "multiple of 2",
        ),
        (concat_gated_qkv, GATED_QKV, 16, "query heads of q: 8 does not divide by tp=16"),
        (groups, Fused((spec("qkvz", 24, 5),), parts=((2, 4),)), 8, "groups of qkvz: 4 does not divide by tp=8"),
        (ungrouped, Fused((spec("qkvz", 24, 5),), parts=((2, 4),)), 8, "groups of qkvz: 4 does not divide by tp=8"),
        (sections, Fused((spec("conv", 12, 4),), parts=((4, 8),)), 8, "a part of conv: 4 does not divide by tp=8"),
    ],
)
def test_cuts_that_do_not_divide_name_axis_and_numbers(rule, fused: Fused, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rule(fused, Cut("tp", 0, size))


def test_a_window_cuts_a_region_on_both_sides() -> None:
    (region,) = same(Fused((spec("a", 4, 6),)), Cut("tp", 0, 1)).regions
    part = region.within(Box((1, 2), (3, 6)))
    assert part is not None and (part.box, part.origin) == (Box((1, 2), (3, 6)), (1, 2))
    assert region.within(Box((4, 0), (5, 6))) is None


def test_wire_round_trip_and_refusals() -> None:
    model = Model(config(num_hidden_layers=2, num_experts=4))
    world = make_world(model, "tp2 etp1 ep2 pp2", "tp2", trainer_stages=(1, 1), engine_stages=(2,), ownership="slice")
    for layout in world.trainer + world.engine:
        raw = encode_layout(layout)
        assert decode_layout(raw) == layout and encode_layout(decode_layout(raw)) == raw
    first = world.engine[0]
    reordered = replace(first, coords=dict(reversed(first.coords.items())))
    assert encode_layout(reordered) == encode_layout(first)
    for broken in (raw[:-1], b"", b"\x93\x03\x02\x03"):
        with pytest.raises(ValueError, match="cannot be read"):
            decode_layout(broken)
    with pytest.raises(ValueError, match="wire version 9, this side reads 3"):
        decode_layout(raw[:1] + b"\x09" + raw[2:])
    with pytest.raises(ValueError, match="wire version 2, this side reads 3"):
        decode_layout(b"\x93\x02\x02\x03")  # whatever else another version says
    orphan = replace(first.shards[0], buffer="nowhere")
    with pytest.raises(ValueError, match="buffer nowhere"):
        encode_layout(replace(first, shards=(orphan,)))
