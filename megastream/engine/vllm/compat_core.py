"""The engine core's part of `compat.py`: methods that are wrapped, stamps, ordered calls, requests that are ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from megastream.engine.vllm import compat, hooks

Make = Callable[[Callable[..., Any]], Callable[..., Any]]

COMMAND = "megastream-call"
"""Request type of our own entries in the engine core's input queue."""

_STAMP = "megastream_stamp"
_SALT = "megastream_salt"

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


# -- keys and values ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's part of a batch: it computes positions [start, end). `num_prompt` is None where the batch does not
    say it; `anew` when nothing that the request had computed before counts any more."""

    request_id: str
    start: int
    end: int
    block_size: int
    num_prompt: int | None
    anew: bool


def scheduled(core: Any, batch: Any) -> Iterator[Scheduled]:
    """Every request of a SchedulerOutput. Positions below `start` are in the cache already."""
    size, counts = core.scheduler.block_size, batch.num_scheduled_tokens
    for new in batch.scheduled_new_reqs:
        start = new.num_computed_tokens
        prompt = new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids
        yield Scheduled(new.req_id, start, start + counts[new.req_id], size, len(prompt), True)
    cached = batch.scheduled_cached_reqs
    for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        anew = request_id in cached.resumed_req_ids
        yield Scheduled(request_id, start, start + counts[request_id], size, None, anew)


def blocks_of(core: Any, request_id: str) -> list[int]:
    """Numbers of the cache blocks that a request holds, in order of positions (of the first group of layers)."""
    return list(core.scheduler.kv_cache_manager.get_block_ids(request_id)[0])


def wrap_lookup(core: Any, make: Make) -> None:
    """Wraps how the cache is asked for a request's prefix, right before its first step or its first after a preemption;
    the request is the first argument."""
    manager = core.scheduler.kv_cache_manager
    for name in ("get_computed_blocks", "get_computed_blocks_for_connector"):  # the second one came with 0.32
        if hasattr(manager, name):
            hooks.wrap_method(manager, name, make)


def salt(request: Any, number: int) -> None:
    """A request without anything computed hits only cached prefixes that were salted with the same number.

    A salt that the client gave stays a part of it.
    """
    given, salted = getattr(request, _SALT, (request.cache_salt, -1))
    if request.num_computed_tokens or salted == number:
        return
    setattr(request, _SALT, (given, number))
    request.cache_salt = f"{given or ''}|megastream {number}"
    request.block_hashes.clear()
    request.update_block_hashes()


def evict_prefixes(core: Any) -> None:
    """Gives up every cached prefix. Requests keep the blocks that they hold."""
    pool = core.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})


def check_preemption(vllm_config: Any) -> None:
    """ValueError names what keeps all running requests from being preempted between two steps."""
    if compat.version() < (0, 32, 0):
        raise ValueError(
            f"megastream.kv is recompute, but vLLM {compat.version_text()} loses the order of tokens under way "
            "when their request is preempted; choose salt, or vLLM 0.32"
        )
    if vllm_config.kv_transfer_config is not None:
        raise ValueError("megastream.kv is recompute, but a KV connector is configured; choose salt, or leave it out")


def preempt_all(core: Any) -> None:
    """All running requests wait again, with nothing computed; what is under way for them is computed once more."""
    try:
        core.scheduler.reset_prefix_cache(reset_running_requests=True)
    except RuntimeError:
        # Blocks of steps under way are freed later: the cache is not empty, and salted as it is, it need not be.
        if core.scheduler.running:
            raise


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


def wrap_finish(make: Make) -> None:
    """Wraps what tells clients that their requests were ended by the core."""
    from vllm.v1.engine.core import EngineCoreProc

    hooks.wrap_method(EngineCoreProc, "_send_finish_outputs_to_client", make)


def send_finished(
    core: Any, request_ids: list[str], client_index: int, reason: Any, carried: Callable[[str], dict[str, Any]]
) -> None:
    """Ends a client's requests on their side; `carried(request_id)` are the kv_transfer_params of the last output."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    outputs = [EngineCoreOutput(r, [], finish_reason=reason, kv_transfer_params=carried(r)) for r in request_ids]
    core.output_queue.put_nowait((client_index, EngineCoreOutputs(finished_requests=set(request_ids), outputs=outputs)))


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
