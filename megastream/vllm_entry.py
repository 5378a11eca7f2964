"""The plugin that vLLM loads in each of its processes, and the composition root for them.

Entry point `vllm.general_plugins`. `vllm serve MODEL --weight-transfer-config '{"backend": "megastream"}'` just serves;
with `--additional-config '{"megastream": {"control_url": ..., "run_id": ..., "engine": ...}}'` every worker starts a
rank agent and the engine core a coordinator, and a trainer can attach. Under `settings` stand the fields of
engine.settings.EngineSettings, for example `"settings": {"commit_s": 30, "staging_sets": 1}`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from megastream.control.redis_log import RedisLog
from megastream.engine.agent import RankAgent
from megastream.engine.coordinator import Coordinator
from megastream.engine.settings import EngineSettings
from megastream.engine.vllm import compat, compat_core, core, cpu_repairs
from megastream.engine.vllm.backend import NAME, MegastreamEngine
from megastream.engine.vllm.kv import KvPolicy, check_policy
from megastream.engine.vllm.live import VllmLiveModel
from megastream.engine.vllm.port import PortSettings, VllmCorePort
from megastream.engine.vllm.worker import Agent
from megastream.transport.gloo import GlooReceiver

logger = logging.getLogger("vllm.megastream")


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """What stands under `megastream` in vLLM's additional config."""

    control_url: str = ""
    """redis:// or unix:// URL of the control plane; empty: serve without a trainer."""
    run_id: str = ""
    engine: str = ""
    """Name of this engine start; a restarted engine takes a new one."""
    host: str = "127.0.0.1"
    """Address under which trainer ranks reach this engine's lanes."""
    reconnect_s: float = 30.0
    """How long a lost control plane is tried before an attachment is given up; then once every `settings.retry_s`."""
    records: bool = False
    """Keep per-step records of versions and batches, fetched by the core utility `megastream_records`."""
    kv: KvPolicy = "salt"
    """What a commit does with keys and values of older versions."""
    settings: EngineSettings = EngineSettings()
    """Times and memory of agents and coordinator; each of its fields can be given."""

    @property
    def attachable(self) -> bool:
        return bool(self.control_url)


def read_settings(vllm_config: Any, *, pin_memory: bool = False) -> PluginSettings:
    """ValueError names an unknown key and the nearest known one, a key that is missing, or a value out of range.

    `pin_memory` is what holds where nothing is said about it.
    """
    given = dict((vllm_config.additional_config or {}).get("megastream", {}))
    limits = given.pop("settings", {})
    _refuse_unknown(given, PluginSettings, "megastream")
    if not isinstance(limits, dict):
        raise ValueError(f"megastream.settings in --additional-config must be an object, got {limits!r}")
    _refuse_unknown(limits, EngineSettings, "megastream.settings")
    settings = PluginSettings(**given, settings=EngineSettings(**{"pin_memory": pin_memory, **limits}))
    check_policy(settings.kv)
    for key in ("run_id", "engine"):
        if settings.attachable and not getattr(settings, key):
            raise ValueError(f"--additional-config has megastream.control_url but no megastream.{key}")
    return settings


def read_port_settings(vllm_config: Any) -> PortSettings:
    """What the engine core itself is told. ValueError as in `read_settings`, or when this vLLM cannot do it."""
    settings = read_settings(vllm_config)
    if settings.kv == "recompute":
        compat_core.check_preemption(vllm_config)
    return PortSettings(records=settings.records, kv=settings.kv)


def _refuse_unknown(given: dict[str, Any], kind: type, where: str) -> None:
    known = [field.name for field in fields(kind)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise ValueError(f"unknown key {where}.{key} in --additional-config; the nearest known key is {near}")


def register() -> None:
    """Loaded by vLLM in the API server, the engine core and every worker; also more than once in one process.

    The backend's name is there on any vLLM version, so that a wrong one is refused by its constructor with a clear
    line: vLLM only logs what a plugin raises.
    """
    compat.register_backend(NAME, __name__, WiredEngine.__name__)
    compat.check_version()
    cpu_repairs.apply()
    core.patch(read_port_settings, wire_core)


class WiredEngine(MegastreamEngine):
    """The backend with a rank agent that talks to the control plane."""

    _close_wires: Callable[[], None] | None = None

    def start_agent(self, live: VllmLiveModel) -> Agent | None:
        settings = read_settings(self.vllm_config, pin_memory=self.device.type == "cuda")
        if not settings.attachable:
            return None
        log = RedisLog(settings.control_url, settings.run_id, reconnect_s=settings.reconnect_s)
        receiver = GlooReceiver(settings.host)
        agent = RankAgent(
            log,
            engine=settings.engine,
            rank=live.rank,
            world_size=self.parallel_config.world_size,
            live=live,
            receiver=receiver,
            settings=settings.settings,
            library=f"vllm {compat.version_text()}",
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


def wire_core(vllm_config: Any, port: VllmCorePort) -> Callable[[], None]:
    """Starts the coordinator in the engine core; returns what ends it."""
    settings = read_settings(vllm_config)
    if not settings.attachable:
        return lambda: None
    if compat.dev_mode():
        logger.warning(
            "VLLM_SERVER_DEV_MODE is on: its endpoints are unauthenticated, anyone who reaches the server can pause it "
            "or replace its weights; megastream does not need it"
        )
    if vllm_config.cache_config.enable_prefix_caching and settings.kv == "keep":
        logger.warning(
            "prefix caching is on and megastream.kv is keep: a cached prefix can hold keys and values of an older "
            "version than the tokens that attend to it; kv_versions of each answer say so"
        )
    log = RedisLog(settings.control_url, settings.run_id, reconnect_s=settings.reconnect_s)
    coordinator = Coordinator(
        log,
        engine=settings.engine,
        world_size=vllm_config.parallel_config.world_size,
        core=port,
        settings=settings.settings,
    )
    coordinator.start()

    def end() -> None:
        coordinator.close()
        log.close()

    return end
