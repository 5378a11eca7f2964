"""Where a rank of a trainer stands, and how it comes together with the others."""

from __future__ import annotations

from dataclasses import dataclass

from megastream.trainer.agreement import gather, raise_first
from megastream.trainer.model import meet

REFUSE_S = 60.0
"""How long a rank whose file is wrong waits for the others, to tell them: the file's own deadlines it does not know."""


@dataclass(frozen=True)
class Place:
    """One rank of a trainer, and where the ranks meet: an `init_method` of torch.distributed."""

    rank: int
    world_size: int
    init_method: str

    def meet(self, deadline_s: float) -> None:
        """Joins the group of all ranks. Collective; blocks for so long at most."""
        meet(rank=self.rank, world_size=self.world_size, init_method=self.init_method, deadline_s=deadline_s)

    def refuse(self, reason: str) -> None:
        """Raises AgreedError here and on all other ranks, which are in `train` or come there, and wait for this one."""
        self.meet(REFUSE_S)
        raise_first(gather(reason))
