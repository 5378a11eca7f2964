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
from megastream.plan.types import Pieces
from megastream.plan.unit import experts_of

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
    "stage": "policy + the longest commit of one trainer stage's units, a rank's commit taken by its bytes; the engine "
    "stands still for those of all stages, one behind the other",
    "idle_experts": "policy + commit without idle_share of the bytes of experts, which are live before; the engine "
    "stands still for both parts",
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
class Parts:
    """Bytes that gates in parts commit apart: `stages[trainer stage][engine rank]`, `experts[engine rank]`."""

    stages: tuple[tuple[int, ...], ...]
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds. `sent_s` by finality policy; `live_s` and `stall_s` (how long the engine stands still) by gate too.

    Gates in parts are left out where a commit pulls, because they need everything staged.
    """

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


def parts_of(pieces: Pieces, num_targets: int) -> Parts:
    """What the units of a plan's pieces are parts of."""
    stage = np.array([int(unit[1:].partition(".")[0]) for unit in pieces.units], dtype=np.int64)
    expert = np.array([experts_of(unit) is not None for unit in pieces.units], dtype=bool)
    num_stages = int(stage.max(initial=0)) + 1
    places = stage[pieces.unit] * num_targets + pieces.target
    stages = np.bincount(places, pieces.num_bytes, num_stages * num_targets).astype(np.int64)
    experts = np.bincount(pieces.target, pieces.num_bytes * expert[pieces.unit], num_targets).astype(np.int64)
    rows = stages.reshape(num_stages, num_targets).tolist()
    return Parts(tuple(map(tuple, rows)), tuple(experts.tolist()))


def expect(
    cost: PlanCost,
    load: Load,
    parts: Parts,
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
    commits: list[float] = []
    for rank, num in cost.by_target.items():  # buffers may be larger than what is sent of them
        host = min(host_bytes.get(rank, 0), num)
        pulled = min(pulled_bytes.get(rank, 0), num - host)
        copied = 2 * (num - host - pulled) / memory
        commits.append(copied + host / hardware.host_bytes_per_s.value + pulled / lane)
    commit = max(commits, default=0.0)
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
    gates = {"version": (commit, commit)}
    if not any(pulled_bytes.values()):
        gates |= _in_parts(_values(cost.by_target), commits, parts, hardware.idle_share.value)
    live = {(policy, gate): sent[policy] + last for gate, (last, _) in gates.items() for policy in sent}
    stall = {(policy, gate): still for gate, (_, still) in gates.items() for policy in sent}
    return Expected(
        wire,
        step,
        backward,
        commit,
        sent,
        live | {("whole", "pause"): step + pause},
        stall | {("whole", "pause"): pause},
    )


def _in_parts(
    sizes: Sequence[int], commits: Sequence[float], parts: Parts, idle_share: float
) -> dict[str, tuple[float, float]]:
    """By gate: seconds of the commit that makes a version whole, and of all of its commits."""

    def longest(part: Sequence[float]) -> float:
        """Of a commit of so many bytes of each rank."""
        return max((took * num / max(size, 1) for took, num, size in zip(commits, part, sizes, strict=True)), default=0)

    by_stage = [longest(stage) for stage in parts.stages]
    gates = {"stage": (max(by_stage), sum(by_stage))}
    if any(parts.experts):
        ahead = [idle_share * num for num in parts.experts]
        rest = longest([size - num for size, num in zip(sizes, ahead, strict=True)])
        gates["idle_experts"] = rest, rest + longest(ahead)
    return gates


def _dense_replicas(coords: Mapping[str, int]) -> int:
    return coords["dp_size"] * coords["cp_size"]


def _values(by_rank: Mapping[int, int]) -> list[int]:
    return list(by_rank.values())
