"""The one way in which tests start processes: forked from a server that has torch and megatron-core loaded.

A forked rank begins in a second; without the server it would spend ten on imports. There is one server per test run,
and it loads what the first user asked for, so nobody may ask for anything else.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOAD = ["torch", "torch.distributed", "megastream.trainer.compat", "megatron.core.models.gpt", "safetensors.torch"]
WITHOUT_CUDA = ["torch", "torch.distributed", "msgspec", "xxhash"]
"""Megatron touches CUDA; what is forked from a process that did cannot use it. For tests that run apart on a GPU."""


def forked(preload: list[str] = PRELOAD) -> ForkServerContext:
    """The context whose processes are forked from that server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    return context
