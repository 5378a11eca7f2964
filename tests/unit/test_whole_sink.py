"""The sink of kind `whole` by itself: which pieces it takes while the engine loads, and that nobody waits for ever."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megastream.engine import whole
from megastream.engine.settings import EngineSettings
from megastream.engine.whole import WholeSink
from megastream.layout.shard import TensorSpec
from megastream.protocol.lane import LaneTimeout
from tests.helpers.plans import TERMS, header_of, small_plan
from tests.helpers.spine import eventually

PLAN = small_plan()
MINE = PLAN.by_target[0]


def sink() -> WholeSink:
    layout: Any = SimpleNamespace(rank=0, tensors=(TensorSpec("w", (80,), "bfloat16"),))
    return WholeSink(replace(TERMS, kind="whole"), PLAN, layout, EngineSettings(liveness_s=5))


def put(into: WholeSink, version: int, value: float, pieces: Any = MINE) -> list[bool]:
    """What was admitted; as one lane's thread does it."""
    admitted = []
    for piece in pieces:
        header = header_of(piece, version)
        admitted.append(into.admit(header, piece.source))
        if admitted[-1]:
            into.write(header, torch.full((piece.num_elements,), value, dtype=torch.bfloat16).view(torch.uint8))
            into.settle(header)
    return admitted


def test_an_older_accepted_version_is_not_mixed_into_the_one_that_loads() -> None:
    into, loaded = sink(), []
    into.accepted(0, 0)
    into.accepted(1, 0)
    loader = threading.Thread(target=lambda: loaded.extend(into.receive(1, 5.0)))
    loader.start()
    eventually(lambda: into._window == 1)
    assert put(into, 0, 7.0) == [False] * len(MINE)
    assert put(into, 1, 1.0) == [True] * len(MINE)
    loader.join(5)
    [(name, tensor)] = loaded
    assert name == "w" and {float(tensor[10 * piece.seq]) for piece in MINE} == {1.0}


def test_a_complete_tensor_waits_for_the_loader_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "QUEUED_TENSORS", 0)
    into = sink()
    into.accepted(1, 0)
    into._open(1, until=whole.time.monotonic() + 0.3)
    with pytest.raises(LaneTimeout, match="w of version 1 waited for the engine's loader until its deadline"):
        put(into, 1, 1.0)


def test_a_piece_of_a_load_that_broke_off_does_not_reach_the_next_one() -> None:
    into = sink()
    into.accepted(1, 0)
    into.accepted(2, 0)
    into._open(1, until=whole.time.monotonic() + 5)
    header = header_of(MINE[0], 1)
    assert into.admit(header, MINE[0].source)
    into._close(1)
    into._open(2, until=whole.time.monotonic() + 5)
    into.write(header, torch.full((MINE[0].num_elements,), 7.0, dtype=torch.bfloat16).view(torch.uint8))
    into.settle(header)
    assert not into._have and put(into, 2, 2.0) == [True] * len(MINE)
