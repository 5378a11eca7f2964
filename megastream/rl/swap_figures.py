"""What one case of the swap experiment says, from its answers and the records of its versions. Numbers in, numbers out.

The strict gate, `version`, would have had the oldest version of a token's label live when that token was made. A
token's drift is how far its logprob is from what that version gives the same tokens, computed anew. Under the strict
gate itself it is not 0 either: a request that lives through a swap keeps its keys and values, and a decode rounds in
another way than a prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from megastream.protocol.mix import mixed_versions
from megastream.protocol.part_records import PartCommitted, RankCommit
from megastream.protocol.records import Committed, Record
from megastream.rl.swap_config import Case


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: a logprob and a label for each token; when it was asked and each of its outputs came."""

    prompt: list[int]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    times_s: tuple[float, ...]
    labels: tuple[str, ...]


@dataclass
class Live:
    """How one version became live."""

    early_bytes: int = 0
    byte_seconds: float = 0.0
    """Sum over early units: bytes, times by how long they were live before the rest."""
    calls: int = 0
    stall_s: float = 0.0
    """Of all its calls, each that of the slowest rank."""
    parts: list[PartCommitted] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Measured:
    """One case as it was run. `rescored`: content -> logprobs of each answer; `contents`: version -> its content."""

    case: Case
    answers: Sequence[Answer]
    seconds: float
    records: Sequence[Record]
    unit_bytes: Mapping[str, int]
    contents: Mapping[int, str]
    rescored: Mapping[str, Sequence[tuple[float, ...]]]


def figures(run: Measured) -> dict[str, Any]:
    """The row of a case. ms and bytes; shares from 0 to 1; None where the case has no such thing."""
    labels = [label for answer in run.answers for label in answer.labels]
    gaps_s = [b - a for answer in run.answers for a, b in zip(answer.times_s, answer.times_s[1:], strict=False)]
    steps_s = [b - a for answer in run.answers for a, b in zip(answer.times_s[1:], answer.times_s[2:], strict=False)]
    lives, size = lives_of(run.records, run.unit_bytes), sum(run.unit_bytes.values())
    drift, of_mixes = drifts(run)
    mixed = sum(mixed_versions(label) is not None for label in labels)
    return {
        "requests": run.case.requests,
        "skew": run.case.skew,
        "speed": run.case.speed,
        "experts": run.case.experts,
        "gate": run.case.gate,
        "swaps": len(lives),
        "in_flight": round(sum(answer.times_s[-1] - answer.times_s[0] for answer in run.answers) / run.seconds, 2),
        "tokens": len(labels),
        "tokens_per_s": round(len(labels) / run.seconds, 2),
        "version_bytes": size,
        "units": len(run.unit_bytes),
        "early_bytes_share": _of(fmean, (live.early_bytes / size for live in lives)),
        "early_ms": _of(fmean, (1e3 * live.byte_seconds / live.early_bytes for live in lives if live.early_bytes)),
        "mixed_token_share": round(mixed / len(labels), 6),
        "longest_gap_ms": _of(max, (1e3 * gap for gap in gaps_s)),
        "median_step_ms": _of(median, (1e3 * step for step in steps_s)),
        "stall_ms": _of(median, (1e3 * live.stall_s for live in lives)),
        "calls_per_swap": _of(fmean, (live.calls for live in lives)),
        "drift_mean": _of(fmean, drift),
        "drift_p99": _of(_p99, drift),
        "drift_max": _of(max, drift),
        "mixed_drift_mean": _of(fmean, of_mixes),
    }


def lives_of(records: Iterable[Record], unit_bytes: Mapping[str, int]) -> list[Live]:
    """How every version that was committed became live, in order."""
    open_: dict[int, Live] = {}
    done: list[Live] = []
    for record in records:
        match record:
            case PartCommitted():
                live = open_.setdefault(record.version, Live())
                live.parts.append(record)
                _add_call(live, record.ranks)
            case Committed():
                live = open_.pop(record.version, Live())
                _add_call(live, record.ranks)
                for part in live.parts:
                    num_bytes = sum(unit_bytes[unit] for unit in part.units)
                    live.early_bytes += num_bytes
                    live.byte_seconds += num_bytes * (record.visible_unix_s - part.visible_unix_s)
                done.append(live)
    return done


def drifts(run: Measured) -> tuple[list[float], list[float]]:
    """Of all tokens, and of those whose label is a mix."""
    drift: list[float] = []
    of_mixes: list[float] = []
    for number, answer in enumerate(run.answers):
        for place, (label, logprob) in enumerate(zip(answer.labels, answer.logprobs, strict=True)):
            between = mixed_versions(label)
            oldest = int(label) if between is None else between[0]
            drift.append(abs(logprob - run.rescored[run.contents[oldest]][number][place]))
            if between is not None:
                of_mixes.append(drift[-1])
    return drift, of_mixes


def _add_call(live: Live, ranks: Sequence[RankCommit]) -> None:
    live.calls += 1
    live.stall_s += max((rank.stall_s for rank in ranks), default=0.0)


def _of(how: Any, values: Iterable[float]) -> float | None:
    found = list(values)
    return round(float(how(found)), 6) if found else None


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
