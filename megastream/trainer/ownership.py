"""Which replica sends what: as configured, or what was measured to be better over the lanes. No torch, no megatron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megastream.layout.trainer import Ownership
from megastream.trainer.policies import Finality

WantedOwnership = Literal["auto", "replica", "slice"]

ANY_TRANSPORT = ("gloo", "ipc", "nccl")

_NOT_MEASURED: tuple[Ownership, str] = "replica", "not measured"

_MEASURED: dict[tuple[str, Finality], tuple[Ownership, str]] = {
    ("gloo", "pipelined"): (
        "replica",
        "slices showed no gain: last byte -0.1 % of a step [-0.5, +0.5], steps -0.0 +- 9.1 %",
    ),
    ("gloo", "speculative"): (
        "replica",
        "slices showed no gain: last byte -0.05 % of a step [-0.09, +0.00], steps -4.7 +- 6.4 %",
    ),
}
"""(transport, policy) -> the better one, and by what: slices have to gain in the last byte or in the step's time,
and to lose in neither, with 95 % confidence. What has no row was not measured.

gloo: `tools/bench_finality.py --dp 2 --pairs 12` with X and X+slice in one run, PP=2 on two cores without other work,
pieces into lanes that only count. Of slices the first unit left 0.3 % (pipelined) and 2.6 % (speculative) of a step
earlier, which no gate shows: a part becomes live once its version is accepted."""


def better_ownership(transport: str, finality: Finality) -> tuple[Ownership, str]:
    """(the better one over lanes of this transport, why)."""
    if finality == "whole":
        return "replica", "nothing leaves before the gather"
    return _MEASURED.get((transport, finality), _NOT_MEASURED)


def choose_ownership(
    wanted: WantedOwnership, finality: Finality, replicas: int, transports: Sequence[str]
) -> tuple[Ownership, str]:
    """(the ownership of a training, why). `transports` are those that its lanes may have, now or with a late joiner.

    All engines of a training get the same slices. So where transports differ in what is better, nothing is sliced.
    """
    if wanted != "auto":
        return wanted, "as configured"
    if replicas == 1:
        return "replica", "one replica of everything, so both are the same"
    found = {transport: better_ownership(transport, finality) for transport in transports}
    why = "; ".join(f"{transport}: {choice}, {reason}" for transport, (choice, reason) in found.items())
    choices = {choice for choice, _ in found.values()}
    return (choices.pop() if len(choices) == 1 else "replica"), why


def described(ownership: Ownership, why: str) -> str:
    """One line for the start of a run."""
    does = {
        "replica": "of several replicas one sends a bucket, after parameters are gathered",
        "slice": "each replica sends what it steps, before parameters are gathered",
    }[ownership]
    return f"ownership {ownership}: {does} ({why})"
