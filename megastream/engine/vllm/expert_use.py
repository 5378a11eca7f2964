"""How often each expert is chosen, counted on the worker inside the model's own steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megastream.engine.contract import LiveModelError
from megastream.engine.vllm import compat


class ExpertUse:
    """Counts at fixed addresses, added to in place by a hook in every router: a captured graph counts as it replays.

    What a graph pads a batch with is counted too, and under tensor parallelism every rank counts all tokens, so that
    experts can look warmer than they are, never colder. Construct it before graphs are captured.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """LiveModelError when this engine's kernels choose experts where nobody can count."""
        routers = compat.expert_routers(model)
        for name, router in routers.values():
            if router is None:
                raise LiveModelError(f"{name} chooses experts inside its kernel, where their use cannot be counted")
        self._layers = tuple(routers)
        width = max((compat.num_routed(router) for _, router in routers.values()), default=0)
        self._counts = torch.zeros(len(routers), width, device=device)
        one = torch.ones(1, device=device)
        for row, (_, router) in zip(self._counts, routers.values(), strict=True):
            compat.watch_router(router, partial(count, row, one))
        on_gpu = device.type == "cuda"
        self._host = torch.empty(self._counts.shape, pin_memory=True) if on_gpu else self._counts
        self._copied = torch.cuda.Event() if on_gpu else None
        self._known: list[list[float]] | None = None
        self._is_asked = False

    def read(self) -> dict[int, Sequence[float]]:
        """Counts by layer, in order of global experts, and halves them. Worker thread, between two steps.

        On a GPU nobody waits: these are the counts that the call before asked for, infinite while there are none.
        """
        if self._copied is None:
            self._known = self._counts.tolist()
        elif not self._is_asked or self._copied.query():
            self._known = self._host.tolist() if self._is_asked else None
            self._host.copy_(self._counts, non_blocking=True)
            self._copied.record()
            self._is_asked = True
        self._counts.mul_(0.5)
        unknown = [float("inf")] * self._counts.shape[1]
        rows = self._known if self._known is not None else [unknown] * len(self._layers)
        return dict(zip(self._layers, rows, strict=True))


def count(row: torch.Tensor, one: torch.Tensor, chosen: torch.Tensor) -> None:
    """Adds one to the counts of a layer, `row` [experts], for every entry of `chosen` [tokens, top k]."""
    index = chosen.reshape(-1).long()
    row.index_add_(0, index, one.expand(index.shape[0]))
