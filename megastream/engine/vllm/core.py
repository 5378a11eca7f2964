"""What the plugin changes in vLLM's EngineCore. Every change does nothing in a core that serves another backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megastream.engine.vllm import compat, hooks
from megastream.engine.vllm.backend import NAME
from megastream.engine.vllm.port import VllmCorePort

logger = logging.getLogger("vllm.megastream")

Wired = Callable[[Any, VllmCorePort], Callable[[], None]]
"""Called with (vllm_config, port) when a core is up; returns what ends it again."""

NATIVE_CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
)


class UpdateRefused(RuntimeError):
    """A native weight update call cannot be served now. Names the call and the remedy."""


def patch(records: Callable[[Any], bool], wire: Wired) -> None:
    """Patches EngineCore in this process, once. `records(vllm_config)` says whether records are kept."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.worker.worker_base import WorkerBase

    from megastream.engine.vllm.worker import megastream_call

    hooks.add_attribute(EngineCore, "megastream", None)
    hooks.wrap_method(EngineCoreProc, "run_busy_loop", lambda original: _with_port(original, records, wire))
    for name, make in (
        ("add_request", _refusing_when_poisoned),
        ("set_weight_version", _relabelling),
        ("_attach_weight_version", _labelling),
        ("collective_rpc", _guarding_native_calls),
        ("shutdown", _unwiring),
    ):
        hooks.wrap_method(EngineCore, name, make)
    hooks.wrap_method(EngineCoreProc, "_handle_client_request", _running_commands)
    hooks.wrap_method(EngineCoreProc, "_process_input_queue", _draining_when_idle)
    hooks.add_attribute(EngineCore, "megastream_records", megastream_records)
    hooks.add_attribute(EngineCore, "megastream_status", megastream_status)
    hooks.add_attribute(WorkerBase, "megastream_call", megastream_call)


def megastream_records(core: Any) -> dict[str, Any]:
    """Core utility: see VllmCorePort.take_records."""
    return _port(core).take_records()


def megastream_status(core: Any) -> dict[str, Any]:
    """Core utility: live version, reason of a poisoning (empty: none), and every rank's own view."""
    port = _port(core)
    return {"version": port.live_version(), "poisoned": port.poisoned, "ranks": port.ask_ranks("status", {})}


def _port(core: Any) -> VllmCorePort:
    port: VllmCorePort | None = core.megastream
    if port is None:
        raise RuntimeError('this engine does not serve megastream; give --weight-transfer-config {"backend": ...}')
    return port


def _with_port(loop: Callable[..., None], records: Callable[[Any], bool], wire: Wired) -> Callable[..., None]:
    """Plugins are loaded in the middle of the core's constructor, so its main loop is the first place to start from."""

    def run_busy_loop(self: Any, *args: Any, **named: Any) -> None:
        config = self.vllm_config
        if compat.selected_backend(config) == NAME:
            port = VllmCorePort(self, config.parallel_config.world_size, records=records(config))
            port.install()
            hooks.wrap_method(self.scheduler, "schedule", lambda schedule: _stamping(schedule, port))
            hooks.wrap_method(self.scheduler, "update_from_output", lambda update: _checking(self, update, port))
            self.megastream = port
            self.megastream_end = wire(config, port)
        elif (config.additional_config or {}).get("megastream"):
            logger.warning(
                'settings for megastream are not used without --weight-transfer-config {"backend": "megastream"}'
            )
        loop(self, *args, **named)

    return run_busy_loop


def _stamping(schedule: Callable[..., Any], port: VllmCorePort) -> Callable[..., Any]:
    def stamped(*args: Any, **named: Any) -> Any:
        batch = schedule(*args, **named)
        port.stamp(batch)
        return batch

    return stamped


def _checking(core: Any, update: Callable[..., Any], port: VllmCorePort) -> Callable[..., Any]:
    def checked(batch: Any, output: Any, *args: Any, **named: Any) -> Any:
        port.check_reports()
        outputs = update(batch, output, *args, **named)
        core.megastream_output_label = port.record(batch, outputs)
        return outputs

    return checked


def _labelling(attach: Callable[..., None]) -> Callable[..., None]:
    def _attach_weight_version(self: Any, outputs: dict[int, Any]) -> None:
        if self.megastream is None:
            attach(self, outputs)
        else:
            compat.label_outputs(outputs, self.megastream_output_label)

    return _attach_weight_version


def _refusing_when_poisoned(add: Callable[..., None]) -> Callable[..., None]:
    def add_request(self: Any, request: Any, *args: Any, **named: Any) -> None:
        if self.megastream is not None and self.megastream.poisoned:
            compat.refuse_retryable(self, request.request_id, request.client_index)
        else:
            add(self, request, *args, **named)

    return add_request


def _relabelling(set_version: Callable[..., None]) -> Callable[..., None]:
    def set_weight_version(self: Any, weight_version: str) -> None:
        set_version(self, weight_version)
        if self.megastream is not None:
            self.megastream.ask_ranks("label", {"label": weight_version})
            self.megastream.set_live(weight_version)

    return set_weight_version


def _running_commands(handle: Callable[..., None]) -> Callable[..., None]:
    def _handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        if request_type == compat.COMMAND:
            request()
        else:
            handle(self, request_type, request)

    return _handle_client_request


def _draining_when_idle(process: Callable[..., None]) -> Callable[..., None]:
    def _process_input_queue(self: Any) -> None:
        if self.megastream is not None:
            self.megastream.drain_when_idle()
        process(self)

    return _process_input_queue


def _unwiring(shutdown: Callable[..., None]) -> Callable[..., None]:
    def shutdown_core(self: Any) -> None:
        port, self.megastream = self.megastream, None
        if port is not None:
            self.megastream_end()
        shutdown(self)
        if port is not None:
            port.close()

    return shutdown_core


def _guarding_native_calls(call: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.megastream is None or method not in NATIVE_CALLS:
            return call(self, method, timeout, args, kwargs)
        info = {**dict(kwargs or {})}
        _refuse_early(self, method, info, args)
        result = call(self, method, timeout, args, kwargs)
        if method == "update_weights":
            _conclude(self.megastream, int(info["update_info"]["version"]))
        return result

    return collective_rpc


def _refuse_early(core: Any, method: str, info: dict[str, Any], args: tuple[Any, ...]) -> None:
    """Everything that a worker would raise about is refused here, where it has one reply (see hooks.Guard)."""
    if method == "start_draft_weight_update":
        raise UpdateRefused(f"{method}: megastream has no draft model; use start_weight_update")
    if method == "init_weight_transfer_engine":
        if info.get("init_info") or any(args):
            raise UpdateRefused(f"{method}: megastream takes no init_info; a trainer attaches over the control plane")
        return
    if method == "update_weights" and set(info.get("update_info", {})) - {"deadline_s"} != {"version"}:
        raise UpdateRefused(f'{method}: give {{"update_info": {{"version": V}}}}, got {info or args}')
    if not compat.is_paused(core):
        raise UpdateRefused(
            f'{method}: the engine is not paused; call pause(mode="keep", clear_cache=False) first, '
            "or stream: streamed versions need no pause"
        )
    for reply in core.megastream.ask_ranks("session", {}):
        if reply["kind"] != "whole":
            what = "a trainer that streams" if reply["kind"] else "no trainer"
            raise UpdateRefused(
                f"{method}: {what} is attached to engine rank {reply['rank']}; attach one with kind whole first"
            )
        if reply["active"] != (method != "start_weight_update"):
            state = "a" if reply["active"] else "no"
            raise UpdateRefused(f"{method}: {state} weight update is active on engine rank {reply['rank']}")


def _conclude(port: VllmCorePort, version: int) -> None:
    failures = [reply for reply in port.ask_ranks("session", {}) if reply["failure"]]
    if not failures:
        port.set_live(str(version))
        port.recover()
        return
    port.ask_ranks("session", {"drop": True})
    what = f"whole update to version {version} failed on rank {failures[0]['rank']}: {failures[0]['failure']}"
    port.become_poisoned(what)
    raise UpdateRefused(f"{what}; send another whole update")
