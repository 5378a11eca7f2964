"""What a test breaks in one worker of a real engine, beneath the product's own agent and lanes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from megastream.engine import stream
from megastream.engine.contract import LiveModelError
from megastream.engine.staging import StagingMemory
from megastream.engine.vllm import buffers
from megastream.engine.vllm.buffers import Prepared
from megastream.engine.vllm.live import VllmLiveModel
from megastream.transport.gloo_pair import PAYLOAD_TAG, GlooPair

TOLD = "told to break"


class Faults:
    """A part of the worker extension. What is broken stays so until `feed_mend`."""

    feed_broken: tuple[Any, ...] = ()
    feed_num_failed = 0

    def feed_mend(self) -> None:
        """Everything is as it was."""
        for patched in self.feed_broken:
            patched.stop()
        self.feed_broken, self.feed_num_failed = (), 0

    def feed_failed_writes(self) -> int:
        """How many have failed since the last `feed_mend`."""
        return self.feed_num_failed

    def feed_break_commits(self, rank: int, times: int, written: bool) -> None:
        """The next `times` writes of rank `rank` fail, half way when `written`, else before the first byte."""
        state = self.weight_transfer_engine.state
        if state.rank != rank:
            return
        honest, left = state.live.commit, [times]

        def commit(*prepared: Prepared) -> None:
            if not left[0]:
                return honest(*prepared)
            left[0] -= 1
            self.feed_num_failed += 1
            if written:
                buffers.apply(_half(buffers.merge(prepared)))
            raise RuntimeError(TOLD)

        self.feed_replace(state.live, "commit", commit)

    def feed_break_receiving(self, rank: int, how: str) -> None:
        """From now on what comes to rank `rank` is `unread` (the transport says that it arrived), cannot be `written`
        into staging, or finds no `room` there."""
        if self.weight_transfer_engine.state.rank != rank:
            return
        receive = GlooPair.post_receive

        def post_receive(pair: GlooPair, tensor: torch.Tensor, tag: int) -> Any:
            return receive(pair, torch.empty_like(tensor) if tag == PAYLOAD_TAG else tensor, tag)

        def fail(*args: Any, **named: Any) -> Any:
            raise RuntimeError(TOLD)

        if how == "unread":
            self.feed_replace(GlooPair, "post_receive", post_receive)
        elif how == "written":
            self.feed_replace(stream, "scatter", fail)
        else:
            self.feed_replace(StagingMemory, "_allocate", fail)

    def feed_raise(self, rank: int) -> None:
        """A call that raises on one rank."""
        if self.weight_transfer_engine.state.rank == rank:
            raise RuntimeError(TOLD)

    def feed_described_with(self, kind: str) -> str:
        """Why this rank's model cannot be patched in place while the last module that holds a parameter has one tensor
        more, a `buffer` or an `attribute`; empty when it can."""
        model, live = self.model_runner.get_model(), VllmLiveModel.__new__(VllmLiveModel)
        live.__dict__.update(self.weight_transfer_engine.state.live.__dict__)
        live.__dict__.pop("buffers", None)
        *_, (module, parameter) = ((m, p) for m in model.modules() for p in m.parameters(recurse=False) if p.numel())
        tensor = parameter.detach().float().repeat(2, *[1] * (parameter.dim() - 1))
        try:
            if kind == "buffer":
                module.register_buffer("planted", tensor)
            elif kind:
                module.planted = tensor
            live.describe()
        except LiveModelError as error:
            return str(error)
        finally:
            module._buffers.pop("planted", None)
            module.__dict__.pop("planted", None)
        return ""

    def feed_replace(self, owner: Any, name: str, value: Any) -> None:
        patched = mock.patch.object(owner, name, value)
        patched.start()
        self.feed_broken = (*self.feed_broken, patched)


def _half(prepared: Prepared) -> Prepared:
    return Prepared(
        copies=prepared.copies[: len(prepared.copies) // 2], kernels=prepared.kernels[: len(prepared.kernels) // 2]
    )
