"""Figures from their writers' processes to what prometheus_client prints."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.engine import set_environment

set_environment()

from prometheus_client import CollectorRegistry, generate_latest  # noqa: E402

from megastream import vllm_entry  # noqa: E402
from megastream.engine.tally import EngineTally, RankTally  # noqa: E402
from megastream.engine.vllm import compat_metrics  # noqa: E402
from megastream.engine.vllm.metrics import Figures, FiguresCollector  # noqa: E402


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server's first process."""
    monkeypatch.setattr(compat_metrics, "_own", None)
    monkeypatch.setenv(compat_metrics._VARIABLE, "/proc/1/fd/0")  # of another server, which has started this process
    compat_metrics.share_page()


def printed(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def shown() -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(FiguresCollector())
    return printed(registry)


def work() -> None:
    """A worker's process: it has no page of its own."""
    compat_metrics._own = None
    compat_metrics.share_page()
    Figures().write_rank(1, 7, 4096, 512, 1024, 2048, 3)


@pytest.mark.usefixtures("page")
def test_what_core_and_workers_write_is_shown_by_the_process_that_started_them() -> None:
    assert shown() == {}
    tally = EngineTally("e", 2, attached=True, overtaken=3)
    tally.ranks[1] = RankTally(8, 2, 0.5)
    Figures().write_engine(tally)
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    found = shown()
    assert found["megastream_attached"] == 1 and found["megastream_overtaken_versions_total"] == 3
    ranks = {name: value for name, value in found.items() if name.endswith('{rank="1"}')}
    assert {name.partition("{")[0].removeprefix("megastream_"): value for name, value in ranks.items()} == {
        "staged_version": 8,
        "commits_total": 2,
        "commit_stall_seconds_total": 0.5,
        "committed_version": 7,
        "received_bytes_total": 4096,
        "staging_bytes": 512,
        "staging_device_bytes": 1024,
        "staging_host_bytes": 2048,
        "staging_kv_blocks": 3,
    }
    assert found['megastream_staged_version{rank="0"}'] == -1


@pytest.mark.usefixtures("page")
def test_a_core_that_refuses_requests_is_shown_as_poisoned_whatever_the_log_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A difference that a rank reports, and a whole update that broke, are in no record."""
    logs: list[Any] = []

    def counted_log(settings: Any, num_ranks: int, figures: Figures) -> Any:
        figures.write_engine(EngineTally("e", num_ranks))
        logs.append(SimpleNamespace(close=lambda: None, write=figures.write_engine))
        return logs[0]

    parts = SimpleNamespace(start=lambda: None, close=lambda: None)
    monkeypatch.setattr(vllm_entry, "_confirm_front_end", lambda: None)
    monkeypatch.setattr(vllm_entry, "CountedLog", counted_log)
    monkeypatch.setattr(vllm_entry, "Coordinator", lambda log, **named: parts)
    config = SimpleNamespace(
        additional_config={"megastream": {"control_url": "redis://h", "run_id": "r", "engine": "e"}},
        parallel_config=SimpleNamespace(world_size=2),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )
    port: Any = SimpleNamespace()
    vllm_entry.wire_core(config, port)
    port.watch_poison(True)
    logs[0].write(EngineTally("e", 2, attached=True, overtaken=3))
    assert (shown()["megastream_poisoned"], shown()["megastream_overtaken_versions_total"]) == (1, 3)
    port.watch_poison(False)
    assert (shown()["megastream_poisoned"], shown()["megastream_attached"]) == (0, 1)


@pytest.mark.usefixtures("page")
def test_several_api_servers_show_them_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM then leaves prometheus_client's default registry aside."""
    from vllm.v1.metrics import prometheus

    original = prometheus.get_prometheus_registry
    monkeypatch.setattr(prometheus, "get_prometheus_registry", getattr(original, "__wrapped__", original))
    monkeypatch.setattr("prometheus_client.REGISTRY.register", lambda collector: None)
    Figures().write_engine(EngineTally("e", 1))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    assert "megastream_attached" not in printed(prometheus.get_prometheus_registry())
    compat_metrics.expose(FiguresCollector())
    assert printed(prometheus.get_prometheus_registry())["megastream_attached"] == 0


def test_a_page_that_is_gone_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat_metrics, "_own", None)
    for path in ("", "/proc/0/fd/3"):
        monkeypatch.setenv(compat_metrics._VARIABLE, path)
        Figures().write_rank(0, 1, 2, 3)
