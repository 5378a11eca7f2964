"""Runs one function on several ranks, each a process of its own. A hang is a failure with stack dumps."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from tests.helpers.forked import forked

GRACE_S = 5.0

SHARED_GPU = dict(NCCL_NET="Socket", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo")
"""NCCL refuses two ranks on one GPU of one host. Ranks that say they are on different hosts it lets pass."""

DETERMINISTIC = dict(CUBLAS_WORKSPACE_CONFIG=":4096:8", NVTE_ALLOW_NONDETERMINISTIC_ALGO="0")
"""Without it two equal stock trainings differ on a GPU."""


def run_ranks(body: Callable[..., Any], world_size: int, *, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
    """Calls `body(rank=, world_size=, init_method=, **kwargs)` on every rank; returns the results in rank order.

    `body` is a module-level function; arguments and results are pickled. A rank that raises, dies or runs past
    `timeout_s` fails the call: all ranks are killed, and the AssertionError carries their last output with stacks.
    """
    # CUDA, once megatron has touched it in the server, cannot be used in its forks.
    context = multiprocessing.get_context("spawn") if torch.cuda.is_available() else forked()
    with tempfile.TemporaryDirectory(prefix="megastream-ranks-") as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        job = (body, world_size, folder, timeout_s, kwargs)
        ranks: list[BaseProcess] = [context.Process(target=_rank, args=(rank, *job)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, timeout_s + GRACE_S)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        failed = [rank for rank, process in enumerate(ranks) if not (Path(folder) / f"{rank}.result").exists()]
        if failed:
            raise AssertionError(_report(Path(folder), failed, [process.exitcode for process in ranks]))
        return [pickle.loads((Path(folder) / f"{rank}.result").read_bytes()) for rank in range(world_size)]


def _wait(ranks: list[BaseProcess], timeout_s: float) -> None:
    """Until all have ended; once one has failed the others get a short while only."""
    end = monotonic() + timeout_s
    while any(process.is_alive() for process in ranks) and monotonic() < end:
        for process in ranks:
            process.join(0.05)
        if any(process.exitcode not in (None, 0) for process in ranks):
            end = min(end, monotonic() + GRACE_S)


def _rank(
    rank: int, body: Callable[..., Any], world_size: int, folder: str, timeout_s: float, kwargs: dict[str, Any]
) -> None:
    output = (Path(folder) / f"{rank}.log").open("w")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=output)
    if torch.cuda.is_available():
        _prepare_cuda(rank, world_size)
    try:
        result = body(rank=rank, world_size=world_size, init_method=f"file://{folder}/rendezvous", **kwargs)
        partial = Path(folder) / f"{rank}.partial"
        partial.write_bytes(pickle.dumps(result))
        partial.rename(partial.with_suffix(".result"))
    except BaseException:  # noqa: BLE001  the parent needs the traceback of whatever it was
        traceback.print_exc(file=output)
        output.flush()
        os._exit(1)
    sys.stdout.flush()
    output.flush()
    # Threads of a failed product object must not keep a rank alive.
    os._exit(0)


def _prepare_cuda(rank: int, world_size: int) -> None:
    os.environ.update(DETERMINISTIC)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if world_size > torch.cuda.device_count():
        os.environ.update(SHARED_GPU, NCCL_HOSTID=f"megastream-rank-{rank}")


def _report(folder: Path, failed: list[int], exit_codes: list[int | None]) -> str:
    logs = [f"--- rank {rank}\n{(folder / f'{rank}.log').read_text()[-3000:]}" for rank in failed]
    return "\n".join([f"ranks {failed} failed; exit codes {exit_codes}", *logs])
