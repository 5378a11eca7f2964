"""The comparison at attach as the core asks a rank for it: slice by slice, until the slowest rank is done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megastream.engine.calls import RankCalls
from megastream.engine.compare import Comparison
from megastream.engine.settings import EngineSettings
from megastream.engine.staging import copies_by_buffer
from megastream.plan import build_plan
from tests.helpers.fake_engine import FakeLive
from tests.helpers.synthetic import FAMILY, engine_side, trainer_side

TRAINERS, LAYOUT = trainer_side("tp1 pp2(2,1) ep2"), engine_side("tp1")[0]
PLAN = build_plan(
    TRAINERS, (LAYOUT,), FAMILY, kind="stream", piece_bytes=65536, experts_per_unit=2, finality="pipelined"
)


@pytest.mark.parametrize("slice_s", [1e-9, 100.0])
def test_a_rank_says_once_what_it_compared(slice_s: float) -> None:
    copies = copies_by_buffer(PLAN.by_target[0])
    comparison = Comparison(FakeLive(LAYOUT), FakeLive(LAYOUT, version=1).buffers, copies)
    said: list[Any] = []
    nothing: Any = SimpleNamespace()
    calls = RankCalls(0, nothing, EngineSettings(compare_slice_s=slice_s), said.append, nothing, nothing)
    calls._sink = lambda attachment: SimpleNamespace(compare=lambda key: comparison)  # type: ignore[method-assign,assignment,return-value]
    asked = {"attachment": "i1", "incarnation": 1, "version": 5, "attempt": 0}
    slices = 1
    while not calls.answer("compare", asked)["done"]:
        assert said == []
        slices += 1
    assert slices == (len(copies) if slice_s < 1 else 1) and len(copies) > 1
    comparison = None  # the others have said it, too: the base is live, and has left staging
    for _ in range(3):
        assert calls.answer("compare", asked) == {"done": True, "error": ""}
    assert [(record.rank, record.tensors, record.differing) for record in said] == [(0, len(copies), len(copies))]
