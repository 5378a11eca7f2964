"""Starts vLLM's AsyncLLM; on a CPU in a fraction of the time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def start_engine(arguments: AsyncEngineArgs) -> AsyncLLM:
    """AsyncLLM.from_engine_args. Blocks until the engine is up; call it where the engine's loop will run.

    vLLM's default is to fork its core and its workers. On a CPU it insists on new processes instead, each of which
    imports torch and vLLM anew. Here they are forked on a CPU too where `may_fork` says so. Otherwise the core starts
    anew, and our plugin in it has the workers forked.
    """
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    with _forking(may_fork()):
        return AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.ENGINE_CONTEXT,
            enable_log_requests=arguments.enable_log_requests,
            disable_log_stats=arguments.disable_log_stats,
        )


def may_fork() -> bool:
    """On a CPU, if this process has one thread, and torch as well (OMP_NUM_THREADS=1).

    A child has no copy of other threads: it waits for ever for a lock that one of them held, or for the end of one that
    an object of the parent owns, as gloo's do. A pool of libgomp's threads does not live through a fork either.
    """
    return current_platform.is_cpu() and len(os.listdir("/proc/self/task")) == 1 and torch.get_num_threads() == 1


@contextmanager
def _forking(on: bool) -> Iterator[None]:
    """vLLM reads the method when it starts a process, in the core as well, which inherits it."""
    before = os.environ.get(METHOD)
    if on:
        os.environ[METHOD] = "fork"
    try:
        yield
    finally:
        if before is not None:
            os.environ[METHOD] = before


def forget_wakeup_fd() -> None:
    """In all processes that are forked from now on: a signal that one of them gets wakes its own event loop only.

    asyncio learns of signals through a socket, which a forked process shares: its SIGTERM would arrive here too.
    """
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
