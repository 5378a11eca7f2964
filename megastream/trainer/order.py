"""When is a bucket's gradient complete inside the backward, and in which order do all replicas say so?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megastream.trainer.buckets import Bucket


class LateGradient(RuntimeError):
    """A gradient came after its bucket had been counted as complete, so what was stepped is wrong."""


class ReadyOrder:
    """Counts gradients of a last microbatch, and hands out complete buckets in one agreed order.

    The first step only watches: how often each parameter's gradient comes, and which bucket is complete before which.
    Replicas issue collectives for the buckets, so they must all go in the same order: that of the first rank of their
    stage, to which `agree` brings everybody. A bucket that is complete out of turn waits for those before it. One that
    gets fewer gradients than in the first step is handed out by `rest` only; other replicas wait for that, and where
    this rank's backward needs them (experts of several ranks) until their group's timeout.
    """

    def __init__(self, buckets: Sequence[Bucket], name_of: Callable[[torch.nn.Parameter], str]) -> None:
        self._buckets = {bucket.name: bucket for bucket in buckets}
        self._home = {param: bucket for bucket in buckets for param, _ in bucket.params}
        self._name_of = name_of
        self._expected: dict[torch.nn.Parameter, int] = {}
        self._turns: list[Bucket] = []
        self._clock = 0
        self._seen: dict[torch.nn.Parameter, int] = {}
        self._last: dict[str, int] = {}
        self._open: dict[str, int] = {}
        self._next = 0

    @property
    def agreed(self) -> bool:
        """Whether the order is known, so that buckets can be handed out during the backward."""
        return bool(self._turns)

    def arrived(self, param: torch.nn.Parameter) -> Iterator[Bucket]:
        """One more gradient of `param` was added; yields the buckets whose turn has come with it.

        LateGradient names a parameter whose bucket was handed out already.
        """
        if (bucket := self._home.get(param)) is None:
            return
        self._clock += 1
        self._seen[param] = self._seen.get(param, 0) + 1
        self._last[bucket.name] = self._clock
        if not self.agreed:
            return
        if self._seen[param] > self._expected.get(param, 0):
            raise LateGradient(
                f"a gradient of {self._name_of(param)} came {self._seen[param]} times in one backward, but "
                f"{self._expected.get(param, 0)} times in the first step; its bucket {bucket.name} was reduced before. "
                f"Use finality 'pipelined' where the use of a weight changes between steps"
            )
        if self._seen[param] == self._expected[param]:
            self._open[bucket.name] -= 1
        while self._next < len(self._turns) and self._open[self._turns[self._next].name] == 0:
            self._next += 1
            yield self._turns[self._next - 1]

    def rest(self) -> Iterator[Bucket]:
        """All gradients are there: the buckets that were not handed out, in the agreed order if there is one."""
        turns = self._turns or list(self._buckets.values())
        while self._next < len(turns):
            self._next += 1
            yield turns[self._next - 1]

    def watched(self) -> tuple[str, ...]:
        """Names of all buckets, in the order in which they were complete in this step."""
        return tuple(sorted(self._buckets, key=lambda name: self._last.get(name, self._clock + 1)))

    def agree(self, names: Sequence[str]) -> None:
        """From the next step on buckets are handed out in this order. ValueError when it is not one of this rank's."""
        if set(names) != set(self._buckets) or len(names) != len(self._buckets):
            strange = sorted(set(names) ^ set(self._buckets))
            raise ValueError(
                f"ranks of one stage have different buckets: {', '.join(strange[:4])}; "
                f"give all of them the same model, bucket_elements and experts_per_unit"
            )
        self._turns = [self._buckets[name] for name in names]
        self._expected = dict(self._seen)

    def next_step(self) -> None:
        """No gradient of the next step is there yet."""
        self._seen, self._last, self._next, self._clock = {}, {}, 0, 0
        waits_for = {name: 0 for name in self._buckets}
        for param in self._expected:
            waits_for[self._home[param].name] += 1
        self._open = waits_for
