"""How long commits took on one rank: on the host, and on a GPU also on the device, without anybody waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CommitTime:
    """Seconds. `host_s` is the worker's call; `device_s` the copies on the GPU, None on CPU, where the call makes them.

    On a GPU the call only enqueues the copies behind the last step's kernels: the next step begins `device_s` later.
    """

    label: str
    host_s: float
    device_s: float | None


@dataclass(slots=True)
class Span:
    """One commit under way."""

    label: str = ""
    host_s: float = 0.0
    begin: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None


class CommitTimes:
    """Worker thread only. `kept`: times are kept until they are taken, which not every engine is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[Span] = []
        self.kept = False

    @contextmanager
    def measure(self, span: Span) -> Iterator[None]:
        """Around one commit's call; `host_s` is there afterwards, also when it raised."""
        started = time.perf_counter()
        if self._on_gpu and self.kept:
            span.begin, span.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            span.begin.record()
        try:
            yield
        finally:
            if span.end is not None:
                span.end.record()
            span.host_s = time.perf_counter() - started
            if self.kept:
                self._spans.append(span)

    def take(self) -> list[CommitTime]:
        """All commits since the last call. Waits for the device if one is still under way there."""
        spans, self._spans = self._spans, []
        return [CommitTime(span.label, span.host_s, _device_s(span)) for span in spans]


def _device_s(span: Span) -> float | None:
    if span.begin is None or span.end is None:
        return None
    span.end.synchronize()
    return float(span.begin.elapsed_time(span.end)) / 1000
