"""Figures of one engine on vLLM's `/metrics`: its processes write them into a shared page, the front end reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megastream.engine.tally import EngineTally
from megastream.engine.vllm import compat_metrics


@dataclass(frozen=True, slots=True)
class Metric:
    """`megastream_<name>`; a counter's name gets `_total` behind it."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str


ENGINE_METRICS = (
    Metric("attached", "gauge", "1 while a trainer is attached and live."),
    Metric("overtaken_versions", "counter", "Complete versions that never became live: a newer one was ready first."),
    Metric("refused_attachments", "counter", "Attachments of a trainer that ended before they were live."),
    Metric("failed_attachments", "counter", "Attachments of a trainer that were live and broke."),
    Metric("poisoned", "gauge", "1 while the engine refuses requests, until a version is live whole on every rank."),
)
RANK_METRICS = (
    Metric("staged_version", "gauge", "Newest version that arrived whole on this rank; -1 before the first."),
    Metric("commits", "counter", "Ordered calls that made a version, or a part of one, live on this rank."),
    Metric("commit_stall_seconds", "counter", "Time that this rank's worker spent in those calls."),
    Metric("committed_version", "gauge", "Version that this rank computes with."),
    Metric("received_bytes", "counter", "Bytes of pieces and headers from the trainer attached last."),
    Metric("staging_bytes", "gauge", "Staging that holds versions, or parts of them, which are not live."),
    Metric("staging_device_bytes", "gauge", "Staging allocated on the device, in use or not; without prepared copies."),
    Metric("staging_host_bytes", "gauge", "Staging allocated in host memory, in use or not."),
    Metric("staging_kv_blocks", "gauge", "KV blocks that would fit in staging_device_bytes."),
)
_POISONED_COLUMN = 1 + [metric.name for metric in ENGINE_METRICS].index("poisoned")
_WORKERS_COLUMN = 1 + [metric.name for metric in RANK_METRICS].index("committed_version")
"""Columns of a rank from here on are written by its worker, those before by the engine core. Column 0: row in use."""


class Figures:
    """The page: row 0 is the engine's, row 1 + r that of rank r. Each number has one writer."""

    def __init__(self) -> None:
        self._numbers = memoryview(compat_metrics.open_page()).cast("d")

    def write_engine(self, tally: EngineTally) -> None:
        """What the log says, as the engine core has counted it."""
        self._write(-1, 1, tally.attached, tally.overtaken, tally.refused, tally.failed)
        for rank, counted in tally.ranks.items():
            self._write(rank, 1, counted.staged_version, counted.commits, counted.commit_stall_s)

    def write_poisoned(self, poisoned: bool) -> None:
        """What the engine core does, for whatever reason: not everything that poisons it is in the log."""
        self._write(-1, _POISONED_COLUMN, poisoned)

    def write_rank(self, rank: int, *values: int) -> None:
        """What a worker knows: RANK_METRICS from `committed_version` on, as many of them as it knows."""
        self._write(rank, _WORKERS_COLUMN, *values)

    def rows(self) -> dict[int, list[float]]:
        """Values by rank, of the rows in use; the engine's has rank -1."""
        width = compat_metrics.NUM_COLUMNS
        starts = range(0, len(self._numbers), width)
        used = [at for at in starts if self._numbers[at]]
        return {at // width - 1: list(map(float, self._numbers[at + 1 : at + width])) for at in used}

    def _write(self, rank: int, column: int, *values: float) -> None:
        at = (rank + 1) * compat_metrics.NUM_COLUMNS
        if at >= len(self._numbers):  # an engine of more than a thousand ranks: the others are shown
            return
        for place, value in enumerate(values, at + column):
            self._numbers[place] = value
        self._numbers[at] = 1


class FiguresCollector:
    """What prometheus_client asks at every scrape."""

    def __init__(self) -> None:
        self._figures = Figures()

    def collect(self) -> Iterator[Any]:
        """Families without numbers where no engine of this vLLM takes a trainer."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        ranks = self._figures.rows()
        engine = ranks.pop(-1, None)
        for column, metric in enumerate(ENGINE_METRICS):
            family = kinds[metric.kind](f"megastream_{metric.name}", metric.help)
            if engine is not None:
                family.add_metric([], engine[column])
            yield family
        for column, metric in enumerate(RANK_METRICS):
            family = kinds[metric.kind](f"megastream_{metric.name}", metric.help, labels=["rank"])
            for rank, values in ranks.items():
                family.add_metric([str(rank)], values[column])
            yield family
