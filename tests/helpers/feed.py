"""Feeds versions to a real engine without a trainer: stand-ins for the rank agent and the coordinator, and breakers.

`Feeder` is a worker extension, `FeedScheduler` brings the core's test utilities into the engine core process. Both can
break the fence on purpose, so that a test sees the tokens that come out of a broken one.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from megastream.engine.contract import CommitRequest, WholeLoad
from megastream.engine.vllm import compat
from megastream.protocol.mix import Mix
from megastream.protocol.records import RankCommit
from tests.helpers import reveal
from tests.helpers.cut import cut
from tests.helpers.feed_faults import Faults
from tests.helpers.feed_tensors import Tensors
from tests.helpers.tiny_moe import Weights, random_weights

RANDOM = 1000
"""Versions from here on are random weights, those below spell their number."""


def version_weights(version: int) -> Weights:
    """The checkpoint of a version, the same in every process."""
    return random_weights(reveal.MOE, version) if version >= RANDOM else reveal.weights(version)


class FeedAgent:
    """Stands in for engine.agent.RankAgent."""

    def __init__(self, live: Any, rank: int, tp: int, tp_size: int, expert_parallel: bool):
        self.live, self.rank = live, rank
        self.layout = {"tp": tp, "tp_size": tp_size, "expert_parallel": expert_parallel}
        self.prepared: dict[int, Any] = {}
        self.behaviour = ""

    def stage(self, version: int) -> None:
        """What a lane's thread does when a version is complete."""
        tensors = cut(version_weights(version), reveal.MOE, self.live.names, **self.layout)
        staging = {name: t.view(-1) for name, t in tensors.items()}
        self.prepared = {version: staging if self.behaviour == "host" else self.live.prepare(staging)}

    def commit(self, request: CommitRequest) -> RankCommit:
        started = time.perf_counter()
        if self.behaviour == "fail":
            return RankCommit(rank=self.rank, ok=False, stall_s=0.0, step=0, error="told to fail")
        if self.behaviour == "host":
            self.live.write_live(self.prepared[request.version])
        elif self.behaviour != "skip":
            self.live.commit(self.prepared[request.version])
        return RankCommit(rank=self.rank, ok=True, stall_s=time.perf_counter() - started, step=0)

    def call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        return {"op": op, "payload": payload}

    attached_kind = "whole"

    def load_whole(self, version: int, deadline_s: float) -> WholeLoad:
        names = {tensor.name for tensor in self.live.describe_whole().tensors}
        if self.behaviour == "fail":
            raise RuntimeError("told to fail")
        weights = version_weights(version)
        return self.live.load_whole((name, tensor) for name, tensor in weights.items() if name in names)

    def close(self) -> None:
        self.prepared = {}


class Feeder(Faults, Tensors):
    """Worker extension. Methods return plain data and must not raise."""

    def feed_process(self) -> str:
        """How this worker began: ForkProcess or SpawnProcess."""
        return type(multiprocessing.current_process()).__name__

    def feed_pid(self) -> int:
        """This worker's process."""
        return os.getpid()

    def feed_install(self) -> None:
        from vllm.distributed import get_tp_group

        state, group = self.weight_transfer_engine.state, get_tp_group()
        parallel = self.vllm_config.parallel_config
        if not isinstance(state.agent, FeedAgent):
            self.real_agent = state.agent
        self.feed = FeedAgent(
            state.live, state.rank, group.rank_in_group, group.world_size, parallel.enable_expert_parallel
        )
        state.agent = self.feed

    def feed_remove(self) -> None:
        """The real agent is asked again."""
        if getattr(self, "real_agent", None) is not None:
            self.weight_transfer_engine.state.agent = self.real_agent

    def feed_use(self, use: dict[int, list[float]] | None) -> None:
        """Wrong on purpose: says this of the use of experts, whatever was counted; None ends it."""
        live = self.weight_transfer_engine.state.live
        live.__dict__.pop("expert_use", None)
        if use is not None:
            live.expert_use = lambda: use

    def feed_skip_parts(self, rank: int, skips: bool) -> None:
        """Wrong on purpose: rank `rank` writes no part of a version, and says that it did."""
        agent = self.weight_transfer_engine.state.agent
        agent.__dict__.pop("commit", None)
        if skips and agent.rank == rank:
            honest = agent.commit
            done = RankCommit(rank=rank, ok=True, stall_s=0.0, step=0)
            agent.commit = lambda request: done if request.mix is not None else honest(request)

    def feed_counts(self) -> dict[int, list[float]]:
        """What the histogram holds, without halving it."""
        use = self.weight_transfer_engine.state.live._use
        return dict(zip(use._layers, use._counts.tolist(), strict=True))

    def feed_stage(self, version: int) -> None:
        """In a thread of its own, like a lane's: the worker goes on decoding."""
        self.feed_thread = threading.Thread(target=self.feed.stage, args=(version,), daemon=True)
        self.feed_thread.start()

    def feed_staged(self) -> bool:
        return not self.feed_thread.is_alive()

    def feed_behave(self, rank: int, behaviour: str) -> None:
        """Rank `rank` will `fail` its commits, or `skip` them and lie; "" is the right way."""
        if rank == self.feed.rank:
            self.feed.behaviour = behaviour

    def feed_unordered(self, version: int, delay_s: float) -> None:
        """Wrong on purpose: each rank writes from its own thread, when it gets to it."""

        def write() -> None:
            time.sleep(delay_s * (1 + self.feed.rank))
            self.feed.live.commit(self.feed.prepared[version])
            self.weight_transfer_engine.state.label = str(version)

        threading.Thread(target=write, daemon=True).start()

    def feed_names(self) -> list[str]:
        """Buffers that the engine computes with on this rank."""
        return list(self.feed.live.names)

    def feed_flip(self, rank: int, name: str) -> None:
        """On one rank, flips the lowest bit of the first element of what the engine computes with."""
        if rank != self.feed.rank:
            return
        live = self.feed.live
        buffer = live.buffers[name]
        values = buffer.read().clone()
        values.view(-1)[:1].view(torch.int16).bitwise_xor_(1)
        if compat.packed_linear(buffer.module) is not None:
            compat.set_packed_linear(buffer.module, compat.pack_linear(values))
        else:
            buffer.parameter.data.view(-1)[:1].view(torch.int16).bitwise_xor_(1)

    def feed_addresses(self) -> dict[str, int]:
        """Where every parameter and buffer of the live model lies."""
        model = self.model_runner.get_model()
        return {name: t.data_ptr() for named in (model.named_parameters(), model.named_buffers()) for name, t in named}

    def feed_expected(self, version: int) -> dict[str, str]:
        """Digests that a version's live buffers must have on this rank."""
        from megastream.engine.digest import tensor_digest

        tensors = cut(version_weights(version), reveal.MOE, self.feed.live.names, **self.feed.layout)
        return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


class FeedScheduler(Scheduler):
    """vLLM's own scheduler; its class is how a test gets code into the engine core's process."""

    feed_preempted = 0

    def _preempt_request(self, *args: Any, **named: Any) -> None:
        self.feed_preempted += 1
        super()._preempt_request(*args, **named)


def feed_commit(core: Any, version: int) -> Future[list[dict[str, Any]]]:
    """Core utility: one commit from another thread, as the coordinator makes it; answers when it is acknowledged."""
    answer: Future[list[dict[str, Any]]] = Future()

    def done(ranks: tuple[RankCommit, ...]) -> None:
        answer.set_result([{"ok": r.ok, "stall_s": r.stall_s, "error": r.error, "step": r.step} for r in ranks])

    request = CommitRequest(attachment="feed", incarnation=1, version=version, attempt=1)
    threading.Thread(target=core.megastream.commit, args=(request, done)).start()
    return answer


def feed_call(core: Any, op: str) -> Future[list[dict[str, Any]]]:
    """Core utility: CorePort.call_ranks."""
    answer: Future[list[dict[str, Any]]] = Future()
    core.megastream.call_ranks(op, {"x": 1}, lambda replies: answer.set_result(list(replies)))
    return answer


def feed_deaf(core: Any, deaf: bool) -> None:
    """Core utility. Deaf: what ranks report is not acted on, so that wrong tokens come out and can be counted."""
    port = core.megastream
    port.__dict__.pop("check_reports", None)
    if deaf:
        port.check_reports = lambda: None
    else:
        port.recover()


def feed_late_labels(core: Any, late: bool) -> None:
    """Core utility. Late: the label is what the engine was last told, read when the output is there."""
    port = core.megastream
    port.__dict__.pop("record", None)
    if late:
        core.feed_told = port._label

        def late_record(batch: Any, outputs: dict[int, Any]) -> str:
            port.spans.add(core.feed_told, outputs, lambda request_id: False)
            return core.feed_told

        port.record = late_record


def feed_output_labels(core: Any, wrong: bool) -> None:
    """Core utility. Wrong: the label is the one of the next step, read when the output is there."""
    port = core.megastream
    port.__dict__.pop("record", None)
    if wrong:

        def record(batch: Any, outputs: dict[int, Any]) -> str:
            port.spans.add(port.label, outputs, lambda request_id: False)
            return port.label

        port.record = record


def feed_wrong_mixes(core: Any, wrong: bool) -> None:
    """Core utility. Wrong: which units of a mix are ahead, and which behind, is remembered the wrong way round."""
    port = core.megastream
    port.__dict__.pop("_remember", None)
    if wrong:
        honest = port._remember
        port._remember = lambda mix: honest(_Turned(mix.oldest, mix.newest, mix.behind, mix.ahead))


class _Turned(Mix):
    """Says the label of the mix that it was made from."""

    @property
    def label(self) -> str:
        return f"{self.oldest}..{self.newest}+{len(self.behind)}"


def feed_label(core: Any, label: str) -> None:
    """Core utility: the second call that names a version after it was committed."""
    core.feed_told = label


def feed_stamp(core: Any, label: str) -> None:
    """Core utility: moves the stamp without a commit."""
    core.megastream.set_live(label)


def feed_cached_blocks(core: Any) -> int:
    """Core utility: blocks of keys and values that a new request could hit."""
    blocks = core.scheduler.kv_cache_manager.block_pool.blocks
    return sum(block.block_hash is not None for block in blocks)


def feed_preempted(core: Any) -> int:
    """Core utility: how often a running request had to wait again, with nothing computed."""
    return core.scheduler.feed_preempted


for _utility in (
    feed_preempted,
    feed_commit,
    feed_call,
    feed_deaf,
    feed_late_labels,
    feed_output_labels,
    feed_wrong_mixes,
    feed_label,
    feed_stamp,
    feed_cached_blocks,
):
    setattr(EngineCore, _utility.__name__, _utility)
