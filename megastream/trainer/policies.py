"""The finality policies by name, what they cost, and what they cannot be combined with. No torch, no megatron."""

from __future__ import annotations

from typing import Literal

Finality = Literal["whole", "pipelined", "speculative", "early"]

MAX_ABORT_RATE = 0.25
"""Default of `max_abort_rate`: a step that is taken back is made and sent twice."""

WINDOW_STEPS = 16
"""Over so many steps the abort rate is watched."""


def is_streamed(finality: Finality) -> bool:
    """Whether buckets are final inside the backward, one by one, so that it pays to end them where a unit ends."""
    return finality in ("speculative", "early")


def clipping_refusal(finality: Finality, clip_grad: float) -> str:
    """Why this policy cannot run with this clipping norm, and what can; empty when it can."""
    if finality != "early" or clip_grad <= 0.0:
        return ""
    return (
        f"finality 'early' cannot clip, but the clipping norm is {clip_grad:g}: a bucket would be final before "
        f"the norm is known; use 'speculative', which takes such steps back, or switch clipping off (0)"
    )


def consequences(finality: Finality, clip_grad: float, max_abort_rate: float = MAX_ABORT_RATE) -> str:
    """One line for the start of a run: what the policy does, and what it costs."""
    clip = f"clipping at {clip_grad:g}" if clip_grad > 0.0 else "no clipping"
    most = max_abort_rate * WINDOW_STEPS
    text = {
        "whole": "weights leave after the whole optimizer step",
        "pipelined": "a bucket leaves once the global norm is known, while the next bucket is stepped",
        "speculative": f"a bucket leaves inside the last backward, provisionally until the norm is known; a step that "
        f"must be clipped is undone, made again and sent again. Costs up to 3 fp32 copies of each rank's optimizer "
        f"shard. As pipelined from more than {int(most)} clipped of the last {WINDOW_STEPS} steps until at most "
        f"{int(most / 2)} are",
        "early": "a bucket leaves inside the last backward; gradients that are not finite end the training",
    }[finality]
    sums = "; with more than two replicas of a weight up to the order of their sums" if is_streamed(finality) else ""
    return f"finality {finality}, {clip}: {text}. Equal to the stock step bit for bit{sums}"
