"""Which transport a lane takes: what was configured, or with `auto` the fastest that both ends have. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

Wanted = Literal["gloo", "nccl", "ipc", "auto"]
WANTED: tuple[Wanted, ...] = ("gloo", "nccl", "ipc", "auto")
FASTEST_FIRST = ("ipc", "nccl", "gloo")


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a lane as it describes itself. `gpu` is empty without one; `nccl` is 22809 for 2.28.9, 0 for none."""

    host: str
    """Equal for processes of one boot of one machine."""
    pid: int
    gpu: str = ""
    nccl: int = 0
    nccl_host: str = ""
    """NCCL_HOSTID, by which NCCL tells machines apart where it is set."""
    handle: bytes = b""
    """A CUDA IPC handle to try, of the trainer."""
    unshared: str = ""
    """Why the trainer's memory cannot be shared, or the engine cannot open it; empty when it can."""


def choose(wanted: Wanted, trainer: Side, engine: Side) -> tuple[str, str]:
    """(transport, why). ValueError in one line when `wanted` cannot be, with the reason and what can."""
    refusals = {"ipc": _ipc_refusal(trainer, engine), "nccl": _nccl_refusal(trainer, engine), "gloo": ""}
    possible = [name for name in FASTEST_FIRST if not refusals[name]]
    if wanted == "auto":
        passed_over = [f"not {name}: {refusals[name]}" for name in FASTEST_FIRST[: FASTEST_FIRST.index(possible[0])]]
        return possible[0], "; ".join(passed_over) or "one host, and the engine's GPU reads the trainer's memory"
    if refusals[wanted]:
        raise ValueError(f"transport {wanted} cannot be used: {refusals[wanted]}; use {' or '.join(possible)}, or auto")
    return wanted, "as configured"


def _ipc_refusal(trainer: Side, engine: Side) -> str:
    if without := _without_gpu(trainer, engine):
        return without
    if trainer.host != engine.host:
        return "trainer and engine are on different hosts"
    if trainer.pid == engine.pid:
        return "trainer and engine are one process"
    return trainer.unshared or engine.unshared


def _nccl_refusal(trainer: Side, engine: Side) -> str:
    if without := _without_gpu(trainer, engine):
        return without
    if not trainer.nccl or trainer.nccl != engine.nccl:
        return f"the trainer has NCCL {_version(trainer.nccl)}, the engine {_version(engine.nccl)}"
    one_host = (trainer.host, trainer.nccl_host) == (engine.host, engine.nccl_host)
    if one_host and trainer.gpu == engine.gpu:
        return "trainer and engine share one GPU, where NCCL takes one rank"
    return ""


def _without_gpu(trainer: Side, engine: Side) -> str:
    missing = [name for name, side in (("trainer", trainer), ("engine", engine)) if not side.gpu]
    return f"the {' and the '.join(missing)} rank has no GPU" if missing else ""


def _version(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else "none"
