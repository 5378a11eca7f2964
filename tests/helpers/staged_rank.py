"""One engine rank without lanes: pieces go straight into its staging, and are committed from there."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch

from megastream.engine.contract import CommitRequest
from megastream.engine.settings import EngineSettings
from megastream.engine.stream import StreamSink
from megastream.layout.shard import RankLayout
from megastream.plan import build_plan
from megastream.plan.types import Piece
from megastream.protocol.mix import Gate, Mix
from tests.helpers.fake_engine import FakeLive
from tests.helpers.plans import TERMS, header_of
from tests.helpers.synthetic import FAMILY, differing, empty_buffers, engine_side, fill, trainer_side

TRAINERS = trainer_side("tp1 pp2(2,1) ep2")
ENGINES = engine_side("tp2 ep2")
PLAN = build_plan(TRAINERS, ENGINES, FAMILY, kind="stream", piece_bytes=65536, experts_per_unit=2, finality="pipelined")
TERM = replace(TERMS, plan_digest=PLAN.digest)
SETTINGS = EngineSettings(liveness_s=5)


class Rank:
    """An engine rank that holds version 0, and what its sink has said."""

    def __init__(self, gate: Gate, layout: RankLayout = ENGINES[1], settings: EngineSettings = SETTINGS) -> None:
        self.live, self.layout = FakeLive(layout), layout
        self.said: list[Any] = []
        self.sink = StreamSink(
            TERM, PLAN, layout, self.live, settings,
            lambda key, elements, prepare_s: self.said.append((key.version, elements)),
            lambda key, units: self.said.append((key.version, units)), gate,
        )  # fmt: skip
        self.pieces = PLAN.by_target[layout.rank]

    def receive(self, version: int, pieces: list[Piece]) -> None:
        for piece in pieces:
            header = header_of(piece, version, 0, TERM)
            assert self.sink.admit(header, piece.source)
            self.sink.write(header, packed(piece, version))
            self.sink.settle(header)

    def units(self) -> set[str]:
        return {piece.unit for piece in self.pieces}

    def commit(self, version: int, units: tuple[str, ...] | None, behind: tuple[str, ...] = ()) -> str:
        mix = Mix(version - 1, version, tuple(units or ()), behind) if behind else None
        return self.sink.commit(CommitRequest("i1", 1, version, 0, units, mix))

    def tensors_not_of(self, version: int) -> set[str]:
        return {name.split(" ")[1].strip("()") for name in differing(self.layout, self.live.buffers, version)}


def packed(piece: Piece, version: int) -> torch.Tensor:
    """The piece as its trainer rank sends it."""
    with filling:
        buffers = sources.setdefault((piece.source, version), empty_buffers(TRAINERS[piece.source]))
        if not any(buffer.any() for buffer in buffers.values()):
            fill(TRAINERS[piece.source], buffers, version)
    flat = buffers[piece.source_buffer]
    copies = [flat.as_strided(c.shape, c.source_strides, c.source_offset).reshape(-1) for c in piece.copies]
    return torch.cat(copies).view(torch.uint8)


filling = threading.Lock()
sources: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
