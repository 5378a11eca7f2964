"""What a host can ask an engine core by name: vLLM calls these its core utilities."""

from __future__ import annotations

from typing import Any

from megastream.engine.vllm import compat_core
from megastream.engine.vllm.kv import check_policy
from megastream.engine.vllm.port import VllmCorePort


def megastream_records(core: Any) -> dict[str, Any]:
    """Core utility: see VllmCorePort.take_records."""
    return _port(core).take_records()


def megastream_status(core: Any) -> dict[str, Any]:
    """Core utility: newest version that was live in every unit, label of the next step's tokens, reason of a poisoning
    (empty: none), and every rank's own view."""
    port = _port(core)
    return {
        "version": port.live_version(),
        "label": port.label,
        "poisoned": port.poisoned,
        "ranks": port.ask_ranks("status", {}),
    }


def megastream_versions(core: Any, label: str) -> dict[str, Any]:
    """Core utility: see VllmCorePort.versions."""
    return _port(core).versions(label)


def megastream_kv(core: Any, policy: str) -> None:
    """Core utility: chooses another policy for keys and values of older versions, see kv.KvPolicy.

    ValueError when it is unknown, or cannot be had from this vLLM.
    """
    chosen = check_policy(policy)
    if chosen == "recompute":
        compat_core.check_preemption(compat_core.config_of(core))
    _port(core).kv.choose(chosen)


def _port(core: Any) -> VllmCorePort:
    port: VllmCorePort | None = core.megastream
    if port is None:
        raise RuntimeError('this engine does not serve megastream; give --weight-transfer-config {"backend": ...}')
    return port


UTILITIES = (megastream_records, megastream_status, megastream_versions, megastream_kv)
