"""What the plugin changes in vLLM's EngineCore. Every change does nothing in a core that serves another backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from megastream.engine.vllm import compat, compat_core
from megastream.engine.vllm.backend import NAME
from megastream.engine.vllm.port import PortSettings, VllmCorePort
from megastream.engine.vllm.utilities import UTILITIES

logger = logging.getLogger("vllm.megastream")

Wired = Callable[[Any, VllmCorePort], Callable[[], None]]
"""Called with (vllm_config, port) when a core is up; returns what ends it again."""

NATIVE_CALLS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)

NEVER_SERVED = {
    "start_draft_weight_update": "megastream has no draft model; use start_weight_update",
    "shutdown_weight_transfer_engine": "there is no connection to release; a trainer detaches over the control plane",
    "reload_weights": "tokens would go on being stamped with the version before; attach a trainer with kind whole",
    "reset_weights": "tokens would go on being stamped with the version before; such weights belong to no version",
}
"""Worker methods that vLLM's API and /collective_rpc can name."""

MAX_DEADLINE_S = 3600.0
"""Longest time that a paused update may keep an engine from stepping."""


class UpdateRefused(RuntimeError):
    """A native weight update call cannot be served now. Names the call and the remedy."""


def patch(settings: Callable[[Any], PortSettings], wire: Wired) -> None:
    """Patches EngineCore in this process, once. `settings(vllm_config)` are the core's."""
    from megastream.engine.vllm.worker import megastream_call

    compat_core.wrap_core(
        {
            "run": lambda original: _with_port(original, settings, wire),
            "add_request": _refusing_when_poisoned,
            "set_label": _relabelling,
            "label_outputs": _labelling,
            "call_workers": _guarding_native_calls,
            "end": _unwiring,
            "handle_input": _running_commands,
            "wait_for_input": _draining_when_idle,
        }
    )
    compat_core.add_to_core("megastream", None)
    compat_core.add_to_core("megastream_end", None)
    for utility in UTILITIES:
        compat_core.add_to_core(utility.__name__, utility)
    compat_core.add_to_workers(megastream_call)


def _with_port(loop: Callable[..., None], settings: Callable[[Any], PortSettings], wire: Wired) -> Callable[..., None]:
    """Plugins are loaded in the middle of the core's constructor, so its main loop is the first place to start from."""

    def run(self: Any, *args: Any, **named: Any) -> None:
        config = compat_core.config_of(self)
        if compat.selected_backend(config) == NAME:
            _start(self, config, settings(config), wire)
        elif (config.additional_config or {}).get("megastream"):
            logger.warning(
                'settings for megastream are not used without --weight-transfer-config {"backend": "megastream"}'
            )
        loop(self, *args, **named)

    return run


def _start(core: Any, config: Any, settings: PortSettings, wire: Wired) -> None:
    """What breaks off here is ended by the core's own shutdown, see `_unwiring`."""
    core.megastream = port = VllmCorePort(core, config.parallel_config.world_size, settings)
    port.install()
    compat_core.wrap_scheduler(
        core, lambda schedule: _stamping(schedule, port), lambda update: _checking(core, update, port)
    )
    compat_core.wrap_lookup(core, lambda lookup: _salting(lookup, port))
    core.megastream_end = wire(config, port)


def _stamping(schedule: Callable[..., Any], port: VllmCorePort) -> Callable[..., Any]:
    def stamped(*args: Any, **named: Any) -> Any:
        batch = schedule(*args, **named)
        port.stamp(batch)
        return batch

    return stamped


def _salting(lookup: Callable[..., Any], port: VllmCorePort) -> Callable[..., Any]:
    def salted(request: Any, *args: Any, **named: Any) -> Any:
        port.kv.salt(request)
        return lookup(request, *args, **named)

    return salted


def _checking(core: Any, update: Callable[..., Any], port: VllmCorePort) -> Callable[..., Any]:
    def checked(batch: Any, output: Any, *args: Any, **named: Any) -> Any:
        port.check_reports()
        outputs = update(batch, output, *args, **named)
        core.megastream_output_label = port.record(batch, outputs)
        return outputs

    return checked


def _labelling(attach: Callable[..., None]) -> Callable[..., None]:
    def label(self: Any, outputs: dict[int, Any]) -> None:
        if self.megastream is None:
            attach(self, outputs)
        else:
            compat_core.label_outputs(outputs, self.megastream_output_label)

    return label


def _refusing_when_poisoned(add: Callable[..., None]) -> Callable[..., None]:
    def add_request(self: Any, request: Any, *args: Any, **named: Any) -> None:
        if self.megastream is not None and self.megastream.poisoned:
            compat_core.refuse_retryable(self, request.request_id, request.client_index)
        else:
            add(self, request, *args, **named)

    return add_request


def _relabelling(set_version: Callable[..., None]) -> Callable[..., None]:
    def relabel(self: Any, weight_version: str) -> None:
        set_version(self, weight_version)
        if self.megastream is not None:
            self.megastream.ask_ranks("label", {"label": weight_version})
            self.megastream.set_live(weight_version)

    return relabel


def _running_commands(handle: Callable[..., None]) -> Callable[..., None]:
    def handle_input(self: Any, request_type: Any, request: Any) -> None:
        if request_type == compat_core.COMMAND:
            request()
        else:
            handle(self, request_type, request)

    return handle_input


def _draining_when_idle(process: Callable[..., None]) -> Callable[..., None]:
    def wait_for_input(self: Any) -> None:
        if self.megastream is not None:
            self.megastream.drain_when_idle()
        process(self)

    return wait_for_input


def _unwiring(shutdown: Callable[..., None]) -> Callable[..., None]:
    def end(self: Any) -> None:
        port, self.megastream = self.megastream, None
        unwire, self.megastream_end = self.megastream_end, None
        with ExitStack() as last:  # in reverse: what is ours first, but vLLM's workers go before the board they write
            if port is not None:
                last.callback(port.close)
            last.callback(shutdown, self)
            if unwire is not None:
                last.callback(unwire)

    return end


def _guarding_native_calls(call: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.megastream is None or method not in (*NATIVE_CALLS, *NEVER_SERVED):
            return call(self, method, timeout, args, kwargs)
        info = {**dict(kwargs or {})}
        _refuse_early(self, method, info, args)
        result = call(self, method, timeout, args, kwargs)
        if method == "update_weights":
            _conclude(self.megastream, info["update_info"]["version"])
        elif method != "init_weight_transfer_engine":
            self.megastream.updating = method == "start_weight_update"
        return result

    return collective_rpc


def _refuse_early(core: Any, method: str, info: dict[str, Any], args: tuple[Any, ...]) -> None:
    """Everything that a worker would raise about is refused here, where it has one reply (see hooks.Guard)."""
    if method in NEVER_SERVED:
        raise UpdateRefused(f"{method}: {NEVER_SERVED[method]}")
    if method == "init_weight_transfer_engine":
        if info != {"init_info": {}} or args:
            raise UpdateRefused(
                f"{method}: megastream takes no init_info but {{}}; a trainer attaches over the control plane"
            )
        return
    if method == "update_weights":
        _refuse_update_info(info, args)
    elif info or args:
        raise UpdateRefused(f"{method}: takes no arguments, got {info or args}")
    if not compat_core.is_paused(core):
        raise UpdateRefused(
            f'{method}: the engine is not paused; call pause(mode="keep", clear_cache=False) first, '
            "or stream: streamed versions need no pause"
        )
    starts = method == "start_weight_update"
    if core.megastream.updating == starts:
        raise UpdateRefused(f"{method}: {'a' if starts else 'no'} weight update is active")
    if starts:  # only here: the engine stands still, and every call to all ranks keeps it waiting
        _refuse_without_trainer(core.megastream, method)


def _refuse_without_trainer(port: VllmCorePort, method: str) -> None:
    for reply in port.ask_ranks("session", {}):
        if reply["kind"] != "whole":
            what = "a trainer that streams" if reply["kind"] else "no trainer"
            raise UpdateRefused(
                f"{method}: {what} is attached to engine rank {reply['rank']}; attach one with kind whole first"
            )


def _refuse_update_info(info: dict[str, Any], args: tuple[Any, ...]) -> None:
    given = info.get("update_info")
    if (
        args
        or set(info) != {"update_info"}
        or not isinstance(given, dict)
        or set(given) - {"deadline_s"} != {"version"}
    ):
        raise UpdateRefused(f'update_weights: give {{"update_info": {{"version": V}}}}, got {info or args}')
    version, deadline_s = given["version"], given.get("deadline_s", 1)
    if type(version) is not int or version < 0:
        raise UpdateRefused(f"update_weights: version must be a whole number from 0 on, got {version!r}")
    if type(deadline_s) not in (int, float) or not 0 < deadline_s <= MAX_DEADLINE_S:
        raise UpdateRefused(
            f"update_weights: deadline_s must be above 0 and at most {MAX_DEADLINE_S:g} s, got {deadline_s!r}"
        )


def _conclude(port: VllmCorePort, version: int) -> None:
    """What the ranks say about the load: the call itself gives no reply."""
    replies = port.ask_ranks("session", {})
    failures = [reply for reply in replies if reply["failure"]]
    if not failures:
        port.set_live(str(version))
        port.recover()
        return
    port.ask_ranks("session", {"drop": True})
    port.updating = False
    what = f"whole update to version {version} failed on rank {failures[0]['rank']}: {failures[0]['failure']}"
    if all(reply["untouched"] for reply in replies):
        raise UpdateRefused(f"{what}; the weights are as they were")
    port.become_poisoned(what)
    raise UpdateRefused(f"{what}; send another whole update")
