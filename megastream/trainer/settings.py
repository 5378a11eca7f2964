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
    """The engine to attach to; empty for the one that came up last."""
    finality: str = "pipelined"
    """When a bucket counts as final; see trainer/finality.py."""
    piece_bytes: int = 1 << 20
    """Largest payload of a piece, in bytes."""
    experts_per_unit: int = 8
    """Experts of a layer that are tracked together."""
    slots_per_target: int = 4
    """Packed pieces per engine rank that may wait for their acknowledgement."""
    ready_s: float = 600.0
    """For all trainer ranks and the engine to come up."""
    bind_s: float = 120.0
    """For every rank to build the plan, and for the lanes to open."""
    transfer_s: float = 600.0
    """Without progress on one piece, or for a version to be acknowledged: longer than an engine may be paused."""
    attach_s: float = 600.0
    """From the emitted base version to the engine's answer."""
    detach_s: float = 120.0
    """For the engine to answer the end of training."""

    def __post_init__(self) -> None:
        if not self.launch:
            raise ValueError("trainer setting launch is empty; give every start of the trainer a name of its own")
        check_settings(self, "trainer setting", {"piece_bytes": MOST_PIECE_BYTES})
