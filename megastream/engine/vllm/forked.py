"""A quicker start on a CPU: the engine core forks its workers.

vLLM has its CPU platform start every process anew, and each of them imports torch and vLLM, the workers behind the core
and the core behind the front end: most of a small engine's start.
"""

from __future__ import annotations

import multiprocessing
import os
import threading

import torch

from megastream.engine.vllm import compat


def fork_workers() -> None:
    """In an engine core that started anew: its workers will be forked. Elsewhere, and on other platforms, nothing.

    vLLM loads plugins in the core before it starts workers. A fork copies every lock that another thread holds at that
    moment, hence the look at threads; those of vLLM's sockets are there already, and no worker uses these sockets: it
    is the same with vLLM's own default for Linux. A pool of libgomp's threads would not live through it either.
    """
    in_core = multiprocessing.current_process().name.startswith("EngineCore")
    if in_core and compat.is_cpu() and torch.get_num_threads() == 1 and threading.active_count() == 1:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
