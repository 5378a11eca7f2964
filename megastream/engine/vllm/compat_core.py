"""The engine core's part of `compat.py`: methods that are wrapped, stamps, ordered calls, requests that are ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from megastream.engine.vllm import compat, hooks

Make = Callable[[Callable[..., Any]], Callable[..., Any]]

COMMAND = "megastream-call"
"""Request type of our own entries in the engine core's input queue."""

_STAMP = "megastream_stamp"

_METHODS = {
    "run": ("EngineCoreProc", "run_busy_loop"),
    "handle_input": ("EngineCoreProc", "_handle_client_request"),
    "wait_for_input": ("EngineCoreProc", "_process_input_queue"),
    "add_request": ("EngineCore", "add_request"),
    "call_workers": ("EngineCore", "collective_rpc"),
    "end": ("EngineCore", "shutdown"),
    "set_label": ("EngineCore", "set_weight_version"),
    "label_outputs": ("EngineCore", "_attach_weight_version"),
}
_SINCE_0_32 = ("set_label", "label_outputs")
"""Earlier versions may have neither these methods nor labels of their own."""


# -- wrapped methods ---------------------------------------------------------------------------------------------------


def check_methods() -> None:
    """UnsupportedVersion names a method of the engine core that megastream wraps and this vLLM does not have."""
    from vllm.v1.engine import core

    for purpose, (owner, name) in _METHODS.items():
        optional = purpose in _SINCE_0_32 and compat.version() < (0, 32, 0)
        if not optional and getattr(getattr(core, owner), name, None) is None:
            raise hooks.missing(f"{owner}.{name}")


def wrap_core(makes: Mapping[str, Make]) -> None:
    """Wraps the engine core's methods in this process, once; the keys are those of `_METHODS`. Nothing if one lacks."""
    from vllm.v1.engine import core

    check_methods()
    for purpose, make in makes.items():
        owner, name = _METHODS[purpose]
        if getattr(getattr(core, owner), name, None) is not None:
            hooks.wrap_method(getattr(core, owner), name, make)


def add_to_core(name: str, value: Any) -> None:
    """Gives every engine core an attribute of ours; a function is a core utility."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, name, value)


def add_to_workers(method: Callable[..., Any]) -> None:
    """Gives every worker a method of ours, which `ordered_call` can name."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, method.__name__, method)


def wrap_scheduler(core: Any, schedule: Make, update: Make) -> None:
    """Wraps what makes a batch of this core, and what takes a batch's output."""
    hooks.wrap_method(core.scheduler, "schedule", schedule)
    hooks.wrap_method(core.scheduler, "update_from_output", update)


def wrap_step(worker: Any, make: Make) -> None:
    """Wraps a worker's forward pass; the batch is its first argument."""
    hooks.wrap_method(worker, "execute_model", make)


# -- steps and calls ---------------------------------------------------------------------------------------------------


def config_of(core: Any) -> Any:
    """The VllmConfig of an engine core."""
    return core.vllm_config


def call_workers(core: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
    """An ordered worker call that is waited for; replies in rank order. Engine core thread only."""
    return list(core.model_executor.collective_rpc(method, args=args))


def has_work(core: Any) -> bool:
    """True while requests run or replies are still to be read."""
    return bool(core.has_work())


def stamp(batch: Any, value: tuple[int, int, str]) -> None:
    """Attaches a stamp to a SchedulerOutput; it travels to every worker with it."""
    setattr(batch, _STAMP, value)


def stamp_of(batch: Any) -> tuple[int, int, str] | None:
    """The stamp of a SchedulerOutput, None for a batch that was not scheduled through us (warm-up)."""
    return getattr(batch, _STAMP, None)


def finished_before(batch: Any) -> set[str]:
    """Requests that ended, in whatever way, between the batch before and this one."""
    return set(batch.finished_req_ids)


def ordered_call(core: Any, method: str, args: tuple[Any, ...]) -> Future[list[Any]]:
    """Puts a worker call into the queue that also carries the model's steps, on every rank; engine core thread only.

    With work to do it returns at once, and the future completes when a later step's reply is read: replies come in
    order. Without work nothing would read it, so the call is waited for.
    """
    executor = core.model_executor
    future: Future[list[Any]] = Future()
    if core.has_work():
        future = executor.collective_rpc(method, args=args, non_block=True)
        return future
    future.set_result(executor.collective_rpc(method, args=args))
    return future


def enqueue(core: Any, command: Callable[[], None]) -> None:
    """Lets the engine core's own thread run `command` between two steps. Any thread."""
    core.input_queue.put_nowait((COMMAND, command))


def has_stop_strings(core: Any, request_id: str) -> bool:
    """True for a running request that vLLM's front end ends when its text says so."""
    request = core.scheduler.requests.get(request_id)
    parameters = None if request is None else request.sampling_params
    return parameters is not None and bool(parameters.stop)


def finish_all_retryable(core: Any, carried: Callable[[str], dict[str, Any]]) -> int:
    """Ends every request with finish reason `error`, which vLLM defines as retryable. Returns their number.

    `carried(request_id)` are the kv_transfer_params of its last output.
    """
    from vllm.v1.request import RequestStatus

    scheduler = core.scheduler
    alive = [(r.request_id, r.client_index) for r in scheduler.requests.values() if not r.is_finished()]
    scheduler.finish_requests([request_id for request_id, _ in alive], RequestStatus.FINISHED_ERROR)
    for request_id, client_index in alive:
        refuse_retryable(core, request_id, client_index, carried(request_id))
    return len(alive)


def refuse_retryable(core: Any, request_id: str, client_index: int, carried: dict[str, Any] | None = None) -> None:
    """Answers one request with finish reason `error`."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, kv_transfer_params=carried)
    core.output_queue.put_nowait((client_index, EngineCoreOutputs(finished_requests={request_id}, outputs=[output])))


def set_label(core: Any, label: str) -> None:
    """What vLLM itself reports as its weight version (0.32; earlier versions have no such field)."""
    if hasattr(core, "_weight_version"):
        core._weight_version = label


def label_outputs(outputs: dict[int, Any], label: str) -> None:
    """Sets the version label on every client's outputs of one step (0.32)."""
    for client_outputs in outputs.values():
        client_outputs.weight_version = label


def is_paused(core: Any) -> bool:
    """True when the scheduler is paused and no batch is under way."""
    return bool(core.is_scheduler_paused()) and not core.has_work()
