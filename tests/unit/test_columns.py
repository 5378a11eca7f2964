"""Arithmetic over columns, held against the same thing said row by row."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastream.families import FAMILIES, Family
from megastream.families.types import ModelShape
from megastream.layout.columns import MAX_KEY, ints, packed
from megastream.layout.mesh import Mesh, trainer_coords
from megastream.layout.naming import Entry
from megastream.layout.shard import RankLayout
from megastream.layout.synthetic import trainer_names
from megastream.layout.wire import decode_layouts, encode_layout
from megastream.plan.names import MAX_ELEMENTS, join_names
from megastream.plan.table import alike
from tests.helpers.edits import replace as edit
from tests.helpers.layout_reference import awkward, tiny
from tests.helpers.layout_world import make_world

numbers = st.integers(0, 3) | st.integers(0, MAX_KEY)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[numbers] * width), min_size=1, max_size=20)))
def test_packed_rows_are_equal_and_ordered_as_rows_are(rows: list[tuple[int, ...]]) -> None:
    """Also where the product of all columns leaves 64 bits."""
    keys = packed(*np.array(rows, dtype=np.int64).T).tolist()
    assert min(keys) >= 0
    for one, key in zip(rows, keys, strict=True):
        assert [key < other for other in keys] == [one < other for other in rows]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=20))
def test_stretches_have_one_number_exactly_when_they_are_equal(stretches: list[list[int]]) -> None:
    length = ints(map(len, stretches))
    number, first = alike(ints(sum(stretches, [])), np.cumsum(length) - length, length)
    assert [stretches[at] for at in first.tolist()] == [stretches[first[each]] for each in range(len(first))]
    for one, each in zip(stretches, number.tolist(), strict=True):
        assert [each == other for other in number.tolist()] == [one == other for other in stretches]
        assert first[each] == stretches.index(one)


def entries(family: Family, shape: ModelShape, names: list[str]) -> list[Entry]:
    return [family.trainer_entry(name, shape) for name in names]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_name_stands_for_does_not_depend_on_what_was_asked_before(name: str) -> None:
    """Layers that are alike are looked up once: from a shape that knows nothing yet the answers are the same."""
    model = awkward(name)
    family, shape, mesh = model.family, model.shape, Mesh()
    names = trainer_names(family, shape, mesh, trainer_coords(mesh, 0))
    known = entries(family, shape, names)
    assert known == entries(family, shape, names[::-1])[::-1]
    assert known == [family.trainer_entry(each, replace(shape)) for each in names]
    layered = next(each for each in names if ".layers.0." in each)
    with pytest.raises(ValueError, match=f"layer {shape.num_layers} of a model with {shape.num_layers} layers"):
        family.trainer_entry(layered.replace(".layers.0.", f".layers.{shape.num_layers}."), shape)


def test_another_table_under_the_same_name_is_looked_up_anew() -> None:
    model = awkward("qwen3_moe")
    name = "decoder.layers.0.mlp.router.weight"
    before = model.family.trainer_entry(name, model.shape)
    rows = tuple(
        replace(row, trainer_rule="column") if row.trainer[-1:] == (name.replace("0", "{layer}"),) else row
        for row in model.family.rows
    )
    after = replace(model.family, rows=rows).trainer_entry(name, model.shape)
    assert (before.rule, after.rule) == ("same", "column")


@cache
def replicas() -> list[RankLayout]:
    return make_world(tiny("qwen3_moe", False), "dp2", "tp1", trainer_stages=(3,), engine_stages=(3,)).trainer


def test_what_layouts_say_alike_is_decoded_once() -> None:
    one, other = decode_layouts([encode_layout(layout) for layout in replicas()])
    assert one.tensors is other.tensors and one.buffers is other.buffers
    assert [one, other] == replicas()


def test_tensors_too_large_for_any_plan_are_refused() -> None:
    spec, *others = replicas()[0].tensors
    layouts = [replace(each, tensors=(edit(spec, shape=(MAX_ELEMENTS, 2)), *others)) for each in replicas()]
    with pytest.raises(ValueError, match=f"{spec.name}: shape .* is more than {MAX_ELEMENTS} elements"):
        join_names(layouts)
