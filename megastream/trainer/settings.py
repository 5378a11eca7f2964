"""What can be set on the trainer side."""

from __future__ import annotations

from dataclasses import dataclass

from megastream.protocol.bounds import MOST_PIECE_BYTES, check_settings


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Times in seconds. Equal on all ranks of one trainer start."""

    launch: str
    """Names this start of the trainer; new at every start, the same on all its ranks."""
    engine: str = ""
    """The one engine to attach to; empty for those that came up last."""
    engines: int = 1
    """So many engines are waited for at the start; each has lanes, slots and an attachment of its own."""
    late_joiners: bool = False
    """Engines may come, go and come back while training goes on. Otherwise the first that is lost ends the training."""
    finality: str = "pipelined"
    """When a bucket counts as final; see trainer/finality.py."""
    piece_bytes: int = 1 << 20
    """Largest payload of a piece, in bytes."""
    experts_per_unit: int = 8
    """Experts of a layer that are tracked together."""
    slots_per_target: int = 4
    """Packed pieces per engine rank that may wait for their acknowledgement; with as many as it gets, a slow engine
    holds no step up, and costs a copy of them."""
    ready_s: float = 600.0
    """For all trainer ranks and the engine to come up."""
    bind_s: float = 120.0
    """For every rank to build the plan, and for the lanes to open."""
    transfer_s: float = 600.0
    """Without the acknowledgement of a piece: longer than an engine may be paused. A version may take longer; an engine
    that needs more than a step for one skips versions."""
    attach_s: float = 600.0
    """From the emitted base version to the engine's answer."""
    lag_s: float = 600.0
    """Longest time that a step waits for engines which have not acknowledged the version before: they skip versions."""
    join_s: float = 600.0
    """Longest time that a step waits until its weights are packed for engines that join before it."""
    alone_s: float = 600.0
    """With `late_joiners`: how long training goes on without any engine."""
    detach_s: float = 120.0
    """For the engine to answer the end of training."""

    def __post_init__(self) -> None:
        if not self.launch:
            raise ValueError("trainer setting launch is empty; give every start of the trainer a name of its own")
        check_settings(self, "trainer setting", {"piece_bytes": MOST_PIECE_BYTES})
        if self.engine and self.engines > 1:
            raise ValueError(
                f"trainer settings engine and engines: engine {self.engine} is one, {self.engines} are waited for; "
                f"leave engine empty or set engines to 1"
            )
