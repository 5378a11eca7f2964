"""Where the processes of one vLLM meet for its metrics, and how they come to stand on vLLM's own `/metrics`.

The process that starts the others makes one page of shared memory, which lies in no file system and goes with the last
process that holds it. Its children find it by an environment variable, as prometheus_client's own processes find their
folder. Writing a number is one store; whoever reads does it when `/metrics` is asked, so nothing is polled.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from megastream.engine.vllm import hooks

logger = logging.getLogger("vllm.megastream")

_VARIABLE = "MEGASTREAM_METRICS"
NUM_COLUMNS, NUM_ROWS = 16, 1025
_BYTES = NUM_COLUMNS * NUM_ROWS * 8

_own: mmap.mmap | None = None
"""The page that this process has made."""


def share_page() -> None:
    """Makes the page, once, unless a parent of this process has: a server's first process always makes its own."""
    global _own
    if _own is None and (multiprocessing.parent_process() is None or _VARIABLE not in os.environ):
        descriptor = os.memfd_create("megastream-metrics")
        os.ftruncate(descriptor, _BYTES)
        _own = mmap.mmap(descriptor, _BYTES)
        os.environ[_VARIABLE] = f"/proc/{os.getpid()}/fd/{descriptor}"


def open_page() -> mmap.mmap:
    """The page of this vLLM. Where it is lost, one that nobody else reads: metrics stop no engine."""
    if _own is not None:
        return _own
    try:
        descriptor = os.open(os.environ[_VARIABLE], os.O_RDWR)
    except (KeyError, OSError) as error:
        logger.warning("metrics of this process are not on /metrics: %s", error)
        return mmap.mmap(-1, _BYTES)
    try:
        return mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)


def owner_pid() -> int:
    """The process that made the page: vLLM's front end, where the plugin is loaded there. 0 when nobody did."""
    _, _, rest = os.environ.get(_VARIABLE, "").partition("/proc/")
    return int(rest.partition("/")[0] or 0)


def expose(collector: Any) -> None:
    """Adds a collector to what vLLM's `/metrics` shows, once in a process.

    vLLM shows prometheus_client's default registry. With several API servers it shows a new one over the files of all
    processes, which collectors of the default registry are not in.
    """
    from prometheus_client import REGISTRY
    from vllm.v1.metrics import prometheus

    def with_ours(make: Callable[[], Any]) -> Callable[[], Any]:
        def registry() -> Any:
            made = make()
            if made is not REGISTRY:
                made.register(collector)
            return made

        REGISTRY.register(collector)
        return registry

    hooks.wrap_method(prometheus, "get_prometheus_registry", with_ours)
