"""What a step may have to be taken back to: masters and optimizer state of this rank's shards, before the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from megastream.trainer.compat import MainShard


@dataclass
class _Saved:
    main: torch.Tensor
    """The copy of the fp32 master."""
    state: dict[str, Any] | None
    """Copies of the moments, and of the step where the optimizer counts it per parameter; None before any step."""


class Undo:
    """Keeps one copy of each shard that was given to `save`, and puts the last ones back.

    Adam has a master and two moments per element, so this is three fp32 copies of a rank's shards; they are allocated
    once. Optimizers that count steps in their groups need nothing here: `SplitStep` advances a group in its `finish`
    only, and an undone step never gets there.
    """

    def __init__(self) -> None:
        self._saved: dict[int, _Saved] = {}
        self._open: list[MainShard] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        tensors = [t for saved in self._saved.values() for t in (saved.main, *(saved.state or {}).values())]
        return sum(t.numel() * t.element_size() for t in tensors if torch.is_tensor(t))

    @torch.no_grad()
    def save(self, shards: Iterable[MainShard]) -> None:
        """Remembers these shards as they are now, until `forget` or `restore`."""
        for shard in shards:
            state = shard.member.optimizer.state.get(shard.main)
            kept = self._saved.get(id(shard.main))
            if kept is None:
                self._saved[id(shard.main)] = _Saved(shard.main.detach().clone(), _copied(state, {}))
            else:
                kept.main.copy_(shard.main)
                kept.state = _copied(state, kept.state or {})
            self._open.append(shard)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back everything saved since the last `forget`. The weights in model dtype are the caller's."""
        for shard in self._open:
            kept, states = self._saved[id(shard.main)], shard.member.optimizer.state
            shard.main.data.copy_(kept.main)
            if kept.state is None:
                states.pop(shard.main, None)
                continue
            for name, value in kept.state.items():
                if torch.is_tensor(value):
                    states[shard.main][name].copy_(value)
                else:
                    states[shard.main][name] = value
        self._open = []

    def forget(self) -> None:
        """The step counts: what was saved is not needed any more, its memory stays for the next step."""
        self._open = []


def _copied(state: dict[str, Any] | None, into: dict[str, Any]) -> dict[str, Any] | None:
    if not state:
        return None
    copied: dict[str, Any] = {}
    for name, value in state.items():
        if torch.is_tensor(value):
            copied[name] = into[name].copy_(value) if name in into else value.detach().clone()
        else:
            copied[name] = value
    return copied
