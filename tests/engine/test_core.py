"""What is wrapped around vLLM's core and workers, without an engine: starts that break off, refusals, replies."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.engine import set_environment

set_environment()

from megastream.engine.contract import CommitRequest  # noqa: E402
from megastream.engine.vllm import compat, compat_core, core  # noqa: E402
from megastream.engine.vllm.commit_times import CommitTimes, Span  # noqa: E402
from megastream.engine.vllm.port import PortSettings, VllmCorePort  # noqa: E402
from megastream.engine.vllm.worker import RankState, megastream_call  # noqa: E402
from megastream.protocol.records import RankCommit  # noqa: E402


def test_a_method_that_vllm_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the plugin, and once more in the backend's constructor: vLLM only logs what a plugin raises."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    compat_core.check_methods()
    with pytest.raises(compat.UnsupportedVersion, match="has no SimpleNamespace.execute_model"):
        compat_core.wrap_step(SimpleNamespace(), lambda original: original)
    monkeypatch.delattr(EngineCore, "_attach_weight_version", raising=compat.version() >= (0, 32, 0))
    monkeypatch.setattr(compat.vllm, "__version__", "0.32.0")
    with pytest.raises(compat.UnsupportedVersion, match=r"has no EngineCore\.(_attach_weight|set_weight)_version"):
        compat_core.check_methods()
    monkeypatch.setattr(compat.vllm, "__version__", "0.26.0")
    compat_core.check_methods()
    monkeypatch.delattr(EngineCoreProc, "_process_input_queue")
    with pytest.raises(compat.UnsupportedVersion, match="0.26.0 has no EngineCoreProc._process_input_queue"):
        compat_core.wrap_core({})


def test_what_breaks_off_at_the_start_is_its_own_error_and_vllm_still_shuts_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    config = SimpleNamespace(
        weight_transfer_config=SimpleNamespace(backend="megastream"),
        parallel_config=SimpleNamespace(world_size=1),
        additional_config={},
    )
    fake: Any = SimpleNamespace(
        vllm_config=config,
        megastream=None,
        megastream_end=None,
        scheduler=SimpleNamespace(
            schedule=print,
            update_from_output=print,
            kv_cache_manager=SimpleNamespace(get_computed_blocks=print),
        ),
        model_executor=SimpleNamespace(collective_rpc=lambda method, args: [{"ok": True, "rank": 0, "error": ""}]),
    )

    def no_control_plane(config: Any, port: Any) -> Any:
        raise OSError("the control plane is away")

    run = core._with_port(lambda self: None, lambda config: PortSettings(), no_control_plane)
    with pytest.raises(OSError, match="the control plane is away"):
        run(fake)
    core._unwiring(lambda self: ended.append("vllm"))(fake)
    assert ended == ["vllm"] and fake.megastream is None

    def failing_end() -> None:
        ended.append("ours")
        raise OSError("the log is gone")

    core._with_port(lambda self: None, lambda config: PortSettings(), lambda config, port: failing_end)(fake)
    with pytest.raises(OSError, match="the log is gone"):
        core._unwiring(lambda self: ended.append("vllm"))(fake)
    assert ended == ["vllm", "ours", "vllm"]


@pytest.mark.parametrize(
    ("info", "named"),
    [
        ({"update_info": {"version": "7"}}, "whole number .* got '7'"),
        ({"update_info": {"version": True}}, "whole number .* got True"),
        ({"update_info": {"version": -1}}, "whole number .* got -1"),
        ({"update_info": {"version": 7, "deadline_s": float("inf")}}, "at most 3600 s, got inf"),
        ({"update_info": {"version": 7, "deadline_s": 0}}, "above 0"),
        ({"update_info": {"version": 7, "deadline_s": "1"}}, "above 0"),
        ({"update_info": None}, "give "),
        ({"update_info": [{"version": 7}]}, "give "),
        ({"update_info": {"version": 7}, "more": 1}, "give "),
        ({}, "give "),
    ],
)
def test_bad_update_info_is_refused_before_a_worker_sees_it(info: dict[str, Any], named: str) -> None:
    def call(self: Any, method: str, timeout: Any, args: Any, kwargs: Any) -> None:
        pytest.fail("a worker was called")

    guarded = core._guarding_native_calls(call)
    with pytest.raises(core.UpdateRefused, match=named):
        guarded(SimpleNamespace(megastream=object()), "update_weights", kwargs=info)


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("reload_weights", "stamped with the version before; attach a trainer with kind whole"),
        ("reset_weights", "such weights belong to no version"),
        ("start_draft_weight_update", "megastream has no draft model"),
        ("shutdown_weight_transfer_engine", "a trainer detaches over the control plane"),
    ],
)
def test_calls_that_would_change_weights_behind_the_stamps_are_never_served(method: str, named: str) -> None:
    called: list[str] = []
    guarded = core._guarding_native_calls(lambda self, method, *args: called.append(method))
    with pytest.raises(core.UpdateRefused, match=f"{method}: .*{named}"):
        guarded(SimpleNamespace(megastream=object()), method)
    assert called == []
    guarded(SimpleNamespace(megastream=None), method)
    assert called == [method], "an engine of another backend is left alone"


class CountingPort:
    """A core's port over two ranks, which counts the calls that all ranks answer."""

    def __init__(self, **session: Any) -> None:
        self.updating, self.session, self.calls, self.poisons = False, session, [], []
        self.live = ""

    def ask_ranks(self, op: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls.append(op)
        reply = {"kind": "whole", "failure": "", "untouched": False, **self.session}
        return [{"rank": rank, **reply} for rank in range(2)]

    def set_live(self, label: str) -> None:
        self.live = label

    def recover(self) -> None: ...

    def become_poisoned(self, reason: str) -> None:
        self.poisons.append(reason)


def native(port: CountingPort, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes one native call after the other in a paused core."""
    monkeypatch.setattr(core.compat_core, "is_paused", lambda core: True)
    guarded = core._guarding_native_calls(lambda self, method, timeout, args, kwargs: None)
    return lambda method, **kwargs: guarded(SimpleNamespace(megastream=port), method, kwargs=kwargs)


def test_a_paused_update_asks_all_ranks_once_before_and_once_after(monkeypatch: pytest.MonkeyPatch) -> None:
    port = CountingPort()
    call = native(port, monkeypatch)
    with pytest.raises(core.UpdateRefused, match="no weight update is active"):
        call("update_weights", update_info={"version": 3})
    for _ in range(2):
        call("start_weight_update")
        with pytest.raises(core.UpdateRefused, match="a weight update is active"):
            call("start_weight_update")
        call("update_weights", update_info={"version": 3})
        call("finish_weight_update")
    assert port.live == "3" and port.calls == ["session"] * 4
    with pytest.raises(core.UpdateRefused, match="no weight update is active"):
        call("finish_weight_update")


@pytest.mark.parametrize("untouched", [True, False])
def test_an_update_that_touched_nothing_does_not_poison(untouched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    port = CountingPort()
    call = native(port, monkeypatch)
    call("start_weight_update")
    port.session = {"failure": "no trainer is attached", "untouched": untouched}
    with pytest.raises(core.UpdateRefused, match="version 3 failed on rank 0: no trainer is attached"):
        call("update_weights", update_info={"version": 3})
    assert len(port.poisons) == (not untouched) and not port.live
    call("start_weight_update")  # the broken one is over


class FixedAgent:
    """Replies what it is told to."""

    def __init__(self, reply: RankCommit | Exception):
        self.reply = reply

    def commit(self, request: CommitRequest) -> RankCommit:
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


def test_no_worker_call_raises_and_a_broken_commit_leaves_no_label() -> None:
    request = {"attachment": "a", "incarnation": 1, "version": 3, "attempt": 1}
    state: Any = RankState(0, torch.device("cpu"))
    worker = SimpleNamespace(rank=0, weight_transfer_engine=SimpleNamespace(state=state))

    def commit(payload: dict[str, Any]) -> tuple[RankCommit, str]:
        reply = megastream_call(worker, "commit", payload)
        return reply, state.label

    reply, label = commit(request)
    assert (reply.ok, label) == (False, "0") and "no agent" in reply.error
    state.agent = FixedAgent(RankCommit(rank=0, ok=True, stall_s=0.0, step=0))
    reply, label = commit({"nonsense": 1})
    assert (reply.ok, label) == (False, "0") and "nonsense" in reply.error
    assert not megastream_call(worker, "commit", None).ok
    assert commit(request)[1] == "3"
    for broken in (RankCommit(rank=0, ok=False, stall_s=0.0, step=0, error="half"), RuntimeError("half")):
        state.agent = FixedAgent(broken)
        reply, label = commit({**request, "version": 4})
        assert (reply.ok, label) == (False, "?") and "half" in reply.error
    state.relabel("4")
    assert state.label == "?"
    for other in (None, SimpleNamespace()):
        stranger = SimpleNamespace(rank=1, weight_transfer_engine=other)
        assert megastream_call(stranger, "commit", request).error.endswith("is not megastream")
        reply = megastream_call(stranger, "status", {})
        assert (reply["ok"], reply["rank"]) == (False, 1)


class FakeEvent:
    """torch.cuda.Event on a device whose clock a test sets."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


def test_device_time_of_a_commit_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    times = CommitTimes(torch.device("cuda"))
    with times.measure(Span("1")):
        pass
    assert times.take() == [], "not kept unless records are"
    times.kept = True
    span = Span("2")
    with pytest.raises(RuntimeError), times.measure(span):
        FakeEvent.now_ms = 40
        raise RuntimeError
    (found,) = times.take()
    assert (found.label, found.device_s) == ("2", 0.04) and 0 < found.host_s == span.host_s < 0.04
    on_cpu = CommitTimes(torch.device("cpu"))
    on_cpu.kept = True
    with on_cpu.measure(Span("3")):
        pass
    assert [time.device_s for time in on_cpu.take()] == [None]


@pytest.mark.parametrize("busy", [True, False])
def test_a_call_in_slices_lets_a_busy_engine_step_between_them(busy: bool) -> None:
    """One rank replies at once, so that each slice would be followed by the next before the core steps."""
    commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    happened: list[str] = []
    slices = 3

    def rpc(method: str, args: Any, non_block: bool = False) -> Any:
        happened.append("slice")
        replies = [{"done": happened.count("slice") == slices, "error": ""}]
        if not non_block:
            return replies
        reply: Future[list[Any]] = Future()
        reply.set_result(replies)
        return reply

    fake: Any = SimpleNamespace(
        input_queue=commands,
        scheduler=SimpleNamespace(block_size=16),
        has_work=lambda: busy,
        model_executor=SimpleNamespace(collective_rpc=rpc),
    )
    port = VllmCorePort(fake, 1, PortSettings())
    nobody = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    no_requests = SimpleNamespace(
        finished_req_ids=(), scheduled_new_reqs=[], scheduled_cached_reqs=nobody, num_scheduled_tokens={}
    )

    def done(replies: tuple[dict[str, Any], ...]) -> None:
        if not replies[0]["done"]:
            port.call_ranks("compare", {}, done)

    try:
        port.call_ranks("compare", {}, done)
        for _ in range(slices):
            port.drain_when_idle()
            while not commands.empty():
                commands.get()[1]()
            if busy:
                happened.append("step")
                port.stamp(no_requests)
    finally:
        port.close()
    assert happened == (["slice", "step"] * slices if busy else ["slice"] * slices)
