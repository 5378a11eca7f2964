"""Pieces that are spoiled on their way out, in the trainer's own process; each ends with the test's monkeypatch."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
import torch

from megastream.control.redis_log import RedisLog
from megastream.protocol.header import PieceHeader
from megastream.protocol.records import Record, WeightsReady
from megastream.sync import binding
from megastream.transport.gloo_lane import GlooSendLane


def spoil_header(patch: pytest.MonkeyPatch, version: int, seq: int, **changes: Any) -> None:
    """Piece `seq` of `version` goes out under a header with these changes."""
    honest = binding.header_maker

    def header_maker(*terms: Any) -> Any:
        make = honest(*terms)

        def make_header(piece: Any, number: int, attempt: int, checksum: int) -> PieceHeader:
            header = make(piece, number, attempt, checksum)
            return msgspec.structs.replace(header, **changes) if (number, piece.seq) == (version, seq) else header

        return make_header

    patch.setattr(binding, "header_maker", header_maker)


def send_twice(patch: pytest.MonkeyPatch, version: int, seq: int) -> None:
    """Piece `seq` of `version` is sent, acknowledged, and sent again."""
    post, acknowledged = GlooSendLane.post, GlooSendLane.acknowledged
    under_way: dict[int, tuple[PieceHeader, torch.Tensor]] = {}

    def noting(self: GlooSendLane, header: PieceHeader, payload: torch.Tensor, deadline_s: float) -> None:
        under_way[id(self)] = header, payload
        post(self, header, payload, deadline_s)

    def again(self: GlooSendLane, deadline_s: float) -> None:
        acknowledged(self, deadline_s)
        header, payload = under_way.pop(id(self))
        if (header.version, header.seq) == (version, seq):
            post(self, header, payload, deadline_s)
            acknowledged(self, deadline_s)

    patch.setattr(GlooSendLane, "post", noting)
    patch.setattr(GlooSendLane, "acknowledged", again)


def hold_manifest(patch: pytest.MonkeyPatch, version: int) -> tuple[threading.Event, threading.Event]:
    """(held, go): the manifest of `version` is kept from the log in redis until `go` is set."""
    honest, held, go = RedisLog.append, threading.Event(), threading.Event()

    def append(self: RedisLog, record: Record) -> str:
        if isinstance(record, WeightsReady) and record.version == version:
            held.set()
            go.wait(30)
        return honest(self, record)

    patch.setattr(RedisLog, "append", append)
    return held, go
