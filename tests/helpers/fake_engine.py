"""An engine without vLLM: flat tensors for live weights, and a core that is one thread with one queue of calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch

from megastream.engine.contract import NO_RANGES, CommitRequest, WholeLoad
from megastream.engine.parts import Ranges
from megastream.layout.engine import whole_rank_layout
from megastream.layout.shard import RankLayout
from megastream.protocol.records import RankCommit
from tests.helpers.synthetic import FAMILY, SHAPE, empty_buffers, fill


class FakeLive:
    """Live weights of one rank, starting at a version. `break_commits` makes so many commits raise; `packs` names the
    buffers that cannot be written in place."""

    def __init__(self, layout: RankLayout, version: int = 0) -> None:
        self.packs: Callable[[str], bool] = lambda name: "o_proj" in name or "w2" in name
        self.layout, self.buffers = layout, empty_buffers(layout)
        self.break_commits = 0
        self.whole: dict[str, torch.Tensor] = {}
        self.use: dict[int, list[float]] = {layer: [0.0] * SHAPE.num_experts for layer in range(SHAPE.num_layers)}
        fill(layout, self.buffers, version)

    def describe(self) -> RankLayout:
        return self.layout

    def describe_whole(self) -> RankLayout:
        names = sorted({shard.tensor for shard in self.layout.shards})
        return whole_rank_layout(
            FAMILY,
            SHAPE,
            rank=self.layout.rank,
            world_size=self.layout.world_size,
            coords=self.layout.coords,
            names=names,
        )

    def read_live(self, buffer: str) -> torch.Tensor:
        return self.buffers[buffer]

    def prepare(
        self, staging: Mapping[str, torch.Tensor], ranges: Mapping[str, Ranges] = NO_RANGES
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of live and new elements."""
        pairs = []
        for name, tensor in staging.items():
            for start, stop in ranges.get(name, ((0, len(tensor)),)):
                pairs.append((self.buffers[name][start:stop], tensor[start:stop]))
        return pairs

    def commit(self, *prepared: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self.break_commits:
            self.break_commits -= 1
            raise RuntimeError("injected: the copy failed")
        for live, new in (pair for pairs in prepared for pair in pairs):
            live.copy_(new)

    def write_live(self, staging: Mapping[str, torch.Tensor], ranges: Mapping[str, Ranges] = NO_RANGES) -> None:
        self.commit(FakeLive.prepare(self, staging, ranges))

    def in_place(self, buffer: str) -> torch.Tensor | None:
        return None if self.packs(buffer) else self.buffers[buffer]

    def expert_use(self) -> Mapping[int, Sequence[float]]:
        return self.use

    def load_whole(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> WholeLoad:
        self.whole = dict(tensors)
        return WholeLoad(load_s=0.01, repair_s=0.002)


class Rank(Protocol):
    """What the core calls on a rank; RankAgent is one, a proxy to another process is one."""

    def commit(self, request: CommitRequest) -> RankCommit: ...

    def call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]: ...


class FakeCore:
    """CorePort over some ranks. Calls run one behind the other in one thread, on all ranks in the same order: on one
    rank after the other, or on all of them `at_once`, as a pull needs it."""

    def __init__(self, ranks: Sequence[Rank], at_once: bool = False) -> None:
        self.ranks, self._at_once = ranks, at_once
        self.poisons: list[str] = []
        self.commits: list[CommitRequest] = []
        self.hold = threading.Event()
        self.hold.set()
        self._version = 0
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def commit(self, request: CommitRequest, done: Callable[[tuple[RankCommit, ...]], None]) -> None:
        def run() -> None:
            if request.mix is None:
                self._version = request.version
            self.commits.append(request)
            done(self._on_all(lambda rank: rank.commit(request)))

        self._queue.put(run)

    def call_ranks(self, op: str, payload: dict[str, Any], done: Callable[[tuple[dict[str, Any], ...]], None]) -> None:
        self._queue.put(lambda: done(self._on_all(lambda rank: rank.call(op, payload))))

    def _on_all(self, call: Callable[[Rank], Any]) -> tuple[Any, ...]:
        if not self._at_once:
            return tuple(call(rank) for rank in self.ranks)
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return tuple(pool.map(call, self.ranks))

    def poison(self, reason: str) -> None:
        self.poisons.append(reason)

    def live_version(self) -> int:
        return self._version

    def close(self) -> None:
        self.hold.set()
        self._queue.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            self.hold.wait(30)
            call()
