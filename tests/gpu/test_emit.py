"""Emission beside a busy GPU: what is final leaves while the compute stream still works, and never waits for it."""

from __future__ import annotations

import pytest
import torch

from megastream.trainer.pack import Packer
from tests.helpers.emit import FakeLane, buffers, emitter, many, plan
from tests.helpers.spine import eventually

SLEEP_CYCLES = 4_000_000_000
"""A few seconds."""
PIECES = 6


def arrives_while_the_compute_stream_is_busy() -> bool:
    """A bucket that another stream has stepped becomes final in the middle of a long kernel of the backward."""
    live = {name: bucket.cuda() for name, bucket in buffers().items()}
    lane, beside = FakeLane(), torch.cuda.Stream()
    with emitter({0: lane}, plan=plan(many(PIECES)), buffers=live, slots=PIECES, deadline_s=60.0) as emit:
        emit.begin(1, 0)
        emit.final("one")
        emit.drain()  # slots are pinned and kernels loaded by then, both of which wait for the GPU
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        (ended := torch.cuda.Event()).record()
        emit.begin(2, 0)
        with torch.cuda.stream(beside):
            live["one"].neg_()
            emit.final("one")
        eventually(lambda: len(lane.sent) == 2 * PIECES, 30)
        busy = not ended.query()
        sent = torch.cat([payload.view(torch.float32) for _, payload in lane.sent[PIECES:]])
        assert torch.equal(sent, -torch.arange(4.0 * PIECES)), "and behind the stream that stepped it"
    torch.cuda.synchronize()
    return busy


def test_a_piece_arrives_before_the_kernel_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arrives_while_the_compute_stream_is_busy()
    made = Packer.__init__

    def on_the_compute_stream(packer: Packer, device: torch.device) -> None:
        made(packer, device)
        packer._stream = torch.cuda.default_stream(device)
        torch.cuda.set_stream(packer._stream)

    monkeypatch.setattr(Packer, "__init__", on_the_compute_stream)
    assert not arrives_while_the_compute_stream_is_busy(), "packed there it would wait, so the test can fail"
