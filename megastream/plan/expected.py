"""How long an update is expected to take, per finality policy and commit gate: a model with few terms, all stated.

It knows no contention between ranks of one machine, no congestion and no checksums, and takes buckets for equal. So it
compares layouts and policies; it does not promise seconds. Lanes are taken to run at the profile's rate, which
no transport reaches yet: docs/gpu-results.md has what they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megastream.plan.cost import PlanCost
from megastream.plan.hardware import Hardware
from megastream.plan.table import Tables

FORMULAS = {
    "wire": "slowest rank's bytes / lane rate + its messages x piece_s",
    "step": "30 bytes of state for each parameter that a rank steps / memory rate + gather of its weights / lane rate",
    "backward": "4 x active parameters of a rank x tokens / (peak x utilization): the last microbatch's",
    "whole": "step + wire",
    "pipelined": "max(step + wire / buckets, step / buckets + wire)",
    "speculative": "max((step + wire) / buckets, step / buckets + wire - backward); a clipped step adds pipelined",
    "early": "as speculative, without clipping",
    "commit": "slowest engine rank: 2 x its bytes that wait on the device / memory rate (read and written once) + "
    "those in host memory / host rate + those that it pulls / lane rate",
    "version": "policy + commit; the engine stands still for the commit",
    "pause": "whole-model way: step + full tensors / lane rate + tensors of a rank x load_tensor_s + pause_s; the "
    "engine stands still for all of it but the step",
}
"""In seconds, from the end of the last backward."""

NO_BYTES: Mapping[int, int] = MappingProxyType({})

WIRE_BYTES = 2
"""Of one weight of a model, bf16, for what the plan itself does not count."""

STATE_BYTES = 30
"""Of one parameter: gradient, master and two moments read (16), the latter three written (12), the weight (2)."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one update asks of the busiest rank of each kind."""

    step_parameters: int
    gather_bytes: int
    active_parameters: float
    buckets: int
    full_receive_bytes: int
    full_send_bytes: float
    tensors: int


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds. `sent_s` by finality policy; `live_s` and `stall_s` (how long the engine stands still) by gate too."""

    wire_s: float
    step_s: float
    backward_s: float
    commit_s: float
    sent_s: dict[str, float]
    live_s: dict[tuple[str, str], float]
    stall_s: dict[tuple[str, str], float]


def load_of(both: Tables, is_expert: Sequence[bool], active: float) -> Load:
    """`is_expert` by tensor of the tables; `active`: part of the experts that a token uses (top-k / experts)."""
    side = both.source
    expert = np.array(is_expert, dtype=bool)[side.tensor]
    volume, num_ranks = both.geometry.volume[side.box], len(side.layouts)
    dense_held, expert_held = (np.bincount(side.rank[rows], volume[rows], num_ranks) for rows in (~expert, expert))
    dense, experts, groups = (
        np.array([size(layout.coords) for layout in side.layouts])
        for size in (_dense_replicas, lambda at: at["edp_size"], lambda at: at["ep_size"])
    )
    gathered = dense_held * (dense - 1) / dense + expert_held * (experts - 1) / experts
    # Tokens of all expert-parallel ranks meet a rank's experts: as if it held them all for its own tokens.
    actives = dense_held + expert_held * groups * active
    sizes = both.shape.prod(axis=0)
    full = np.bincount(both.target.described_rank, sizes[both.target.described]) * WIRE_BYTES
    return Load(
        step_parameters=int((dense_held / dense + expert_held / experts).max()),
        gather_bytes=int(WIRE_BYTES * gathered.max()),
        active_parameters=float(actives.max()),
        buckets=max(len(layout.buffers) for layout in side.layouts),
        full_receive_bytes=int(full.max()),
        full_send_bytes=float(full.sum()) / num_ranks,
        tensors=max(len(layout.tensors) for layout in both.target.layouts),
    )


def expect(
    cost: PlanCost,
    load: Load,
    hardware: Hardware,
    host_bytes: Mapping[int, int] = NO_BYTES,
    pulled_bytes: Mapping[int, int] = NO_BYTES,
) -> Expected:
    """The formulas above, in numbers. By engine rank, of a version: those that wait in host memory, that are pulled."""
    lane, memory = hardware.lane_bytes_per_s.value, hardware.memory_bytes_per_s.value
    sides = (cost.by_source, cost.pieces_by_source), (cost.by_target, cost.pieces_by_target)
    wire = max(
        max(b / lane + n * hardware.piece_s.value for b, n in zip(*map(_values, side), strict=True)) for side in sides
    )
    step = STATE_BYTES * load.step_parameters / memory + load.gather_bytes / lane
    flops = hardware.peak_flops_per_s.value * hardware.utilization.value
    backward = 4 * load.active_parameters * hardware.microbatch_tokens.value / flops
    commit = 0.0
    for rank, num in cost.by_target.items():  # buffers may be larger than what is sent of them
        host = min(host_bytes.get(rank, 0), num)
        pulled = min(pulled_bytes.get(rank, 0), num - host)
        copied = 2 * (num - host - pulled) / memory
        commit = max(commit, copied + host / hardware.host_bytes_per_s.value + pulled / lane)
    n = load.buckets
    streamed = max((step + wire) / n, step / n + wire - backward)
    sent = {
        "whole": step + wire,
        "pipelined": max(step + wire / n, step / n + wire),
        "speculative": streamed,
        "early": streamed,
    }
    full = max(load.full_receive_bytes, load.full_send_bytes) / lane
    pause = full + load.tensors * hardware.load_tensor_s.value + hardware.pause_s.value
    live = {(policy, "version"): seconds + commit for policy, seconds in sent.items()}
    stall = dict.fromkeys(live, commit)
    return Expected(
        wire,
        step,
        backward,
        commit,
        sent,
        live | {("whole", "pause"): step + pause},
        stall | {("whole", "pause"): pause},
    )


def _dense_replicas(coords: Mapping[str, int]) -> int:
    return coords["dp_size"] * coords["cp_size"]


def _values(by_rank: Mapping[int, int]) -> list[int]:
    return list(by_rank.values())
