"""What a rank finds on the control plane when it looks for layouts."""

from __future__ import annotations

import pytest

from megastream.protocol.bind import engine_blob, plan_of, put_refusal, trainer_blob
from megastream.protocol.terms import ProtocolError
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.plans import attach_record


def test_whoever_looks_for_a_layout_that_a_rank_refused_to_give_says_why() -> None:
    log, attach = MemoryLog(MemoryStore()), attach_record()
    log.put_blob(trainer_blob(1, 0), b"a layout")
    log.put_blob(engine_blob("e", 0, "stream"), b"of an earlier start")
    put_refusal(log, engine_blob("e", 1, "stream"), "tied over stages")
    with pytest.raises(ProtocolError, match="^engine e, rank 1: tied over stages$"):
        plan_of(log, attach, 2, ("trainer", 0))
    put_refusal(log, engine_blob("e", 0, "stream"), "tied, too")
    with pytest.raises(ProtocolError, match="^engine e, rank 0: tied, too$"):
        plan_of(log, attach, 2, ("trainer", 0))
    put_refusal(log, engine_blob("e", 0, "stream"), "")
    put_refusal(log, engine_blob("e", 1, "stream"), "")
    with pytest.raises(ProtocolError, match="layout engine/e/1/stream is not on the control plane"):
        plan_of(log, attach, 2, ("trainer", 0))
