"""The plugin that vLLM loads in each of its processes, and the composition root for them.

Entry point `vllm.general_plugins`. `vllm serve MODEL --weight-transfer-config '{"backend": "megastream"}'` just serves;
with `--additional-config '{"megastream": {"control_url": ..., "run_id": ..., "engine": ...}}'` every worker starts a
rank agent and the engine core a coordinator, and a trainer can attach. Under `settings` stand the fields of
engine.settings.EngineSettings, for example `"settings": {"staging_sets": 1, "staging": {"device_bytes": 8000000000}}`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from megastream import __version__
from megastream.control.login import split_login
from megastream.control.redis_log import RedisLog
from megastream.engine.agent import RankAgent
from megastream.engine.attachment import Attachment
from megastream.engine.coordinator import Coordinator
from megastream.engine.settings import EngineSettings, read_engine_settings, refuse_unknown
from megastream.engine.tally import EngineTally
from megastream.engine.vllm import (
    compat,
    compat_core,
    compat_metrics,
    core,
    cpu_repairs,
    ended,
    forked,
    front,
    routes,
    serving,
)
from megastream.engine.vllm.backend import NAME, MegastreamEngine
from megastream.engine.vllm.kv import KvPolicy, check_policy
from megastream.engine.vllm.live import VllmLiveModel
from megastream.engine.vllm.metrics import Figures, FiguresCollector
from megastream.engine.vllm.port import PortSettings, VllmCorePort
from megastream.engine.vllm.worker import Agent
from megastream.protocol.mix import Gate, check_gate
from megastream.protocol.records import Record
from megastream.transport.choice import Wanted
from megastream.transport.lanes import Receiver

logger = logging.getLogger("vllm.megastream")

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_LONGEST_RECONNECT_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """What stands under `megastream` in vLLM's additional config."""

    control_url: str = ""
    """redis:// or unix:// URL of the control plane; empty: serve without a trainer."""
    run_id: str = ""
    engine: str = ""
    """Name of this engine start; a restarted engine takes a new one. A second data-parallel core adds -dp1 to it."""
    host: str = "127.0.0.1"
    """Address under which trainer ranks reach this engine's lanes."""
    transport: Wanted = "gloo"
    """What lanes go over: gloo (host memory), ipc (GPUs of one host), nccl (other GPUs), or auto: what is there."""
    reconnect_s: float = 30.0
    """How long a lost control plane is tried before an attachment is given up; then once every `settings.retry_s`."""
    records: bool = False
    """Keep per-step records of versions and batches, fetched by the core utility `megastream_records`."""
    kv: KvPolicy = "salt"
    """What a commit does with keys and values of older versions."""
    gate: Gate = "version"
    """Which sealed units of a version become live when. A host can choose another one later: EngineSync.set_gate."""
    expert_use: bool = False
    """Count how often experts are chosen, which gate `idle_experts` needs; it turns this on by itself."""
    token_file: str = ""
    """Holds the token that vLLM's development endpoints want (VLLM_SERVER_DEV_MODE); without one they are closed."""
    settings: EngineSettings = EngineSettings()
    """Times and memory of agents and coordinator; each of its fields can be given."""

    @property
    def attachable(self) -> bool:
        return bool(self.control_url)


def read_settings(vllm_config: Any, *, device: str = "cpu") -> PluginSettings:
    """ValueError names an unknown key and the nearest known one, a missing key, or a value of a wrong type or range.

    Where nothing is said about them, `pin_memory` and `staging_device` are what suits weights on `device`.
    """
    given = _given(vllm_config.additional_config)
    limits = given.pop("settings", {})
    refuse_unknown(given, PluginSettings, "megastream")
    if "kv" in given:
        check_policy(given["kv"])
    if "gate" in given:
        check_gate(given["gate"])
    try:
        settings = msgspec.convert(given, PluginSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"--additional-config: {str(error).replace('`$.', '`megastream.')}") from error
    _check_values(settings)
    staging_device = "cpu" if settings.transport == "gloo" else device
    index = compat.data_parallel_index(vllm_config)
    engine = f"{settings.engine}-dp{index}" if index and settings.engine else settings.engine
    engine_settings = read_engine_settings(limits, device=device, staging_device=staging_device)
    return replace(settings, engine=engine, settings=engine_settings)


def _given(additional_config: Any) -> dict[str, Any]:
    """What stands under `megastream`; nothing where the config is an object of some other plugin's own kind."""
    if isinstance(additional_config, str | int | float | list):
        raise ValueError(f"--additional-config must be an object, not {type(additional_config).__name__}")
    given = additional_config.get("megastream", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(
            f"megastream in --additional-config must be an object with names as keys, not {type(given).__name__}"
        )
    return dict(given)


def _check_values(settings: PluginSettings) -> None:
    if settings.attachable:
        split_login(settings.control_url)  # refuses what it cannot read, without showing it
    for key in ("run_id", "engine"):
        value = getattr(settings, key)
        if settings.attachable and not value:
            raise ValueError(f"--additional-config has megastream.control_url but no megastream.{key}")
        if value and not settings.attachable:
            raise ValueError(f"--additional-config has megastream.{key} but no megastream.control_url")
        if value and not _NAME.fullmatch(value):
            raise ValueError(
                f"megastream.{key} in --additional-config is {value!r}; use 1 to 100 letters, digits, dots, dashes and "
                "underscores"
            )
    if not settings.host or not settings.host.isprintable() or " " in settings.host:
        raise ValueError(f"megastream.host in --additional-config is {settings.host!r}; give a host name or an address")
    if not 0 < settings.reconnect_s <= _LONGEST_RECONNECT_S:
        raise ValueError(
            f"megastream.reconnect_s in --additional-config is {settings.reconnect_s}; it must be above 0 and at most "
            f"{_LONGEST_RECONNECT_S:.0f}"
        )


def read_port_settings(vllm_config: Any) -> PortSettings:
    """What the engine core itself is told. ValueError as in `read_settings`, or when this vLLM cannot do it."""
    settings = read_settings(vllm_config)
    if settings.kv == "recompute":
        compat_core.check_preemption(vllm_config)
    return PortSettings(records=settings.records, kv=settings.kv)


def register() -> None:
    """Loaded by vLLM in the API server, the engine core and every worker; also more than once in one process.

    The backend's name is there on any vLLM version, so that a wrong one is refused by its constructor with a clear
    line: vLLM only logs what a plugin raises.
    """
    compat.register_backend(NAME, __name__, WiredEngine.__name__)
    compat.check_version()
    compat_metrics.share_page()
    compat_metrics.expose(FiguresCollector())
    cpu_repairs.apply()
    forked.fork_workers()
    core.patch(read_port_settings, wire_core)
    compat_core.add_to_core(routes.VERSION_UTILITY, routes.megastream_version)
    ended.patch()
    front.patch()
    serving.patch(read_settings)


class WiredEngine(MegastreamEngine):
    """The backend with a rank agent that talks to the control plane."""

    _close_wires: Callable[[], None] | None = None

    def start_agent(self, live: VllmLiveModel) -> Agent | None:
        settings = read_settings(self.vllm_config, device=str(self.device))
        if not settings.attachable:
            return None
        if settings.expert_use or settings.gate == "idle_experts":
            live.count_experts(self.device)
        log = RedisLog(settings.control_url, settings.run_id, reconnect_s=settings.reconnect_s)
        receiver = Receiver(settings.host, settings.transport, self.device, say=logger.info)
        figures = Figures()

        def watch(current: Attachment | None) -> None:
            received, staged = (0, 0) if current is None else (current.received_bytes, current.staging_bytes)
            tiers = (0, 0) if current is None else current.tier_bytes
            if str(self.device) != "cpu" == settings.settings.staging_device:
                tiers = 0, sum(tiers)
            block_bytes = compat.kv_block_bytes(self.vllm_config) if tiers[0] else 0
            blocks = tiers[0] // block_bytes if block_bytes else 0
            figures.write_rank(live.rank, agent.live_version, received, staged, *tiers, blocks)

        agent = RankAgent(
            log,
            engine=settings.engine,
            rank=live.rank,
            world_size=self.parallel_config.world_size,
            live=live,
            receiver=receiver,
            settings=settings.settings,
            library=f"vllm {compat.version_text()}",
            gate=settings.gate,
            watch=watch,
        )
        agent.start()

        def close_wires() -> None:
            receiver.close()
            log.close()

        self._close_wires = close_wires
        return agent

    def shutdown(self) -> None:
        super().shutdown()
        if self._close_wires is not None:
            self._close_wires()
            self._close_wires = None


def _confirm_front_end() -> None:
    """RuntimeError when the process that hands answers out has no plugin: their records would not be checked there.

    In a worker without it vLLM does not know the backend's name, so with this one all processes have it.
    """
    pid = compat_metrics.owner_pid()
    if pid in (0, os.getpid()) or compat.rust_front_end():
        raise RuntimeError(
            "megastream's plugin is not loaded in vLLM's front end, or this process was not told so; let VLLM_PLUGINS "
            "name megastream, and set neither VLLM_USE_RUST_FRONTEND nor VLLM_WORKER_MULTIPROC_METHOD=forkserver"
        )
    logger.info(
        "megastream %s is loaded in front end %d, engine core %d and all workers", __version__, pid, os.getpid()
    )


class CountedLog(RedisLog):
    """The coordinator's log: what it reads is counted on the way, for /metrics."""

    def __init__(self, settings: PluginSettings, num_ranks: int, figures: Figures) -> None:
        super().__init__(settings.control_url, settings.run_id, reconnect_s=settings.reconnect_s)
        self._tally, self._figures = EngineTally(settings.engine, num_ranks), figures
        self._figures.write_engine(self._tally)

    def read(self, after: str, block_s: float) -> list[tuple[str, Record]]:
        entries = super().read(after, block_s)
        if any([self._tally.take(record) for _, record in entries]):
            self._figures.write_engine(self._tally)
        return entries


def wire_core(vllm_config: Any, port: VllmCorePort) -> Callable[[], None]:
    """Starts the coordinator in the engine core; returns what ends it."""
    settings = read_settings(vllm_config)
    if not settings.attachable:
        return lambda: None
    _confirm_front_end()
    if compat.dev_mode():
        logger.warning(
            "VLLM_SERVER_DEV_MODE is on: whoever has the token of megastream.token_file can pause the engine or "
            "replace its weights over HTTP; megastream does not need it"
        )
    if vllm_config.cache_config.enable_prefix_caching and settings.kv == "keep":
        logger.warning(
            "prefix caching is on and megastream.kv is keep: a cached prefix can hold keys and values of an older "
            "version than the tokens that attend to it; kv_versions of each answer say so"
        )
    world_size, figures = vllm_config.parallel_config.world_size, Figures()
    port.watch_poison = figures.write_poisoned
    log = CountedLog(settings, world_size, figures)
    coordinator = Coordinator(
        log,
        engine=settings.engine,
        world_size=world_size,
        core=port,
        settings=settings.settings,
        gate=settings.gate,
    )
    coordinator.start()

    def end() -> None:
        coordinator.close()
        log.close()

    return end
