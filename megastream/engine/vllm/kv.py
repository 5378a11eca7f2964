"""Which version computed the keys and values that a token attends to, and what a commit does with older ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

from megastream.engine.vllm import compat_core
from megastream.engine.vllm.compat_core import Scheduled

KvPolicy = Literal["keep", "salt", "evict", "recompute"]
"""What happens to keys and values of older versions when a version becomes live.

`salt`: running requests keep theirs, but a request that is scheduled for the first time (or again, after it was
preempted) never hits a cached prefix of another version. `evict`: the same, and cached prefixes of older versions are
given up at once, which vLLM also tells those who follow its KV events. `recompute`: as `salt`, and running requests
are preempted, so that every further token attends to the new version only. `keep`: vLLM's own behaviour; a new request
may hit a prefix of any version.
"""

KEY = "kv_versions"

Span = tuple[str | None, int, int]
"""(version, start, end) of positions in prompt and answer; version None: computed before the policy became `keep`."""


def check_policy(policy: str) -> KvPolicy:
    """ValueError names an unknown policy and the known ones."""
    for known in get_args(KvPolicy):
        if policy == known:
            return known
    raise ValueError(f"megastream.kv is {policy!r}; choose one of {', '.join(get_args(KvPolicy))}")


class KvBook:
    """Engine core thread only. `salt`, `commit` and `scheduled` are called in the order in which they happen."""

    def __init__(self, policy: KvPolicy) -> None:
        self._policy = policy
        self._commits = 0
        self._spans: dict[str, list[Span]] = {}
        self._prompts: dict[str, int] = {}
        self._blocks: dict[int, list[Span]] = {}
        """Under `keep`: who computed the positions of each cache block."""

    @property
    def policy(self) -> KvPolicy:
        return self._policy

    def choose(self, policy: KvPolicy) -> None:
        """Takes effect at the next step. Blocks that were cached before are of an unknown version."""
        self._policy = policy
        self._blocks = {}

    def salt(self, request: Any) -> None:
        """Before a request's prefix is looked up: it gets a salt that only requests since the last commit have.

        Not when it is added: a commit may come before its first step. Nor at the commit: that would hash the prompts of
        all who wait again, while nobody steps.
        """
        if self._policy != "keep":
            compat_core.salt(request, self._commits)

    def commit(self, core: Any) -> None:
        """Another version is live from the next step on."""
        self._commits += 1
        if self._policy == "evict":
            compat_core.evict_prefixes(core)
        elif self._policy == "recompute":
            compat_core.preempt_all(core)

    def scheduled(self, label: str, requests: Iterable[Scheduled], blocks_of: Callable[[str], list[int]]) -> None:
        """A step computes keys and values of these positions with version `label`."""
        for request in requests:
            self._begin(request)
            spans = self._spans[request.request_id]
            reached = spans[-1][2] if spans else 0
            blocks = blocks_of(request.request_id) if self._policy == "keep" else []
            if request.start > reached:
                spans += self._hit(label, reached, request.start, blocks, request.block_size)
            _append(_cut(spans, request.start), (label, request.start, request.end))
            self._note_blocks(label, request, blocks)

    def carried(self, request_id: str, num_tokens: int) -> dict[str, Any]:
        """The positions whose keys and values a request's tokens attended to, as its output carries them.

        The last of its `num_tokens` tokens was only sampled; steps that were scheduled ahead do not count.
        """
        end = self._prompts.get(request_id, 0) + num_tokens - 1
        spans = _cut(list(self._spans.get(request_id, ())), end)
        return {KEY: [{"version": version, "start": start, "end": stop} for version, start, stop in spans]}

    def forget(self, request_id: str) -> None:
        """Drops a request that ended."""
        self._spans.pop(request_id, None)
        self._prompts.pop(request_id, None)

    def _begin(self, request: Scheduled) -> None:
        """A request that is new, or was preempted and has lost what it had computed, starts from nothing."""
        if request.num_prompt is not None:
            self._prompts[request.request_id] = request.num_prompt
        if request.anew or request.request_id not in self._spans:
            self._spans[request.request_id] = []

    def _hit(self, label: str, start: int, end: int, blocks: list[int], block_size: int) -> list[Span]:
        """Positions that came from cached prefixes. Salted ones are of the live version: no other salt is hit."""
        if self._policy != "keep":
            return [(label, start, end)]
        found: list[Span] = []
        for index in range(start // block_size, -(-end // block_size)):
            unknown: list[Span] = [(None, index * block_size, (index + 1) * block_size)]
            for version, first, last in self._blocks.get(blocks[index], unknown):
                _append(found, (version, max(first, start), min(last, end)))
        return found

    def _note_blocks(self, label: str, request: Scheduled, blocks: list[int]) -> None:
        if self._policy != "keep":
            return
        size = request.block_size
        for index in range(request.start // size, -(-request.end // size)):
            first, last = max(request.start, index * size), min(request.end, (index + 1) * size)
            spans = _cut(self._blocks.get(blocks[index], []), first)
            # A block begins anew when its first position is computed; what another request left in it is gone.
            kept = spans if spans and spans[-1][2] == first else _append([], (None, index * size, first))
            self._blocks[blocks[index]] = _append(kept, (label, first, last))


def _cut(spans: list[Span], end: int) -> list[Span]:
    """In place: what lies at or behind `end` goes, for a preempted request or draft tokens that were not taken."""
    while spans and spans[-1][1] >= end:
        spans.pop()
    if spans and spans[-1][2] > end:
        version, start, _ = spans[-1]
        spans[-1] = (version, start, end)
    return spans


def _append(spans: list[Span], span: Span) -> list[Span]:
    """In place; joins a span to the one before it when both are of one version."""
    version, start, end = span
    if spans and spans[-1][0] == version and spans[-1][2] == start:
        spans[-1] = (version, spans[-1][1], end)
    elif end > start:
        spans.append(span)
    return spans
