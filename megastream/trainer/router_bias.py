"""The routers' bias for the choice of experts: no parameter, and not the optimizer's.

Megatron changes it in `finalize_model_grads` from the tokens that each expert got: before the step, whatever becomes of
the step. So it is final long before a version is, and it changes while an older version may still be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

BUFFER = "router_bias"
"""The name of the buffer that it leaves from, beside the names of buckets."""


class RouterBiases:
    """One flat fp32 copy of all biases of this rank, and the routers that they live in.

    What leaves is the copy: `take` makes it once a step is known to count and the version before is packed. A step that
    is skipped leaves it alone, though megatron's own biases have moved on. Until `hold` it follows the model, so that
    what is loaded before the first step is there.
    """

    def __init__(self, routers: Sequence[tuple[str, Any]]) -> None:
        """`routers`: canonical name of a bias and the router that has it, in the order of the layers; at least one."""
        self._routers = dict(routers)
        sizes = [router.expert_bias.numel() for router in self._routers.values()]
        first = next(iter(self._routers.values())).expert_bias
        self.data = torch.zeros(sum(sizes), dtype=torch.float32, device=first.device)
        self._parts = dict(zip(self._routers, self.data.split(sizes), strict=True))
        self._follows = True

    @property
    def places(self) -> list[tuple[str, tuple[int, ...], int]]:
        """(canonical name, shape, first element in `data`) of each."""
        return [(name, tuple(part.shape), part.storage_offset()) for name, part in self._parts.items()]

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """Megatron's own, as they are now, by canonical name."""
        return {name: router.expert_bias for name, router in self._routers.items()}

    def current(self) -> torch.Tensor:
        """`data`, brought to the model's state as long as no step is followed."""
        if self._follows:
            self.take()
        return self.data

    def hold(self) -> None:
        """From now on only `take` changes the copy."""
        self.take()
        self._follows = False

    @torch.no_grad()
    def take(self) -> None:
        """Copies what the routers have. On CUDA it is enqueued on the current stream."""
        for name, value in self.live.items():
            self._parts[name].copy_(value)

    @torch.no_grad()
    def put(self) -> None:
        """The inverse of `take`."""
        for name, value in self.live.items():
            value.copy_(self._parts[name])
