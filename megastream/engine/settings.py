"""What can be set on the engine side."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megastream.protocol.bounds import check_settings

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Times in seconds. The defaults suit a run; tests shorten them."""

    staging_sets: int = 2
    """Versions that may be in staging at once, on every rank. Each costs one copy of the rank's weights, in host memory
    unless `staging_device` says otherwise.

    A complete version costs a second copy until it is live, where preparing it makes one: on a GPU all of it, in the
    GPU's memory, unless staging lies there; on CPU the packed weights, which are most of it.
    """
    pin_memory: bool = False
    """Page-lock staging, for engines that copy from it to a GPU."""
    staging_device: str = "cpu"
    """Where staging lies: "cpu" (host memory) or a GPU as torch names it. Lanes over ipc and nccl want the GPU."""
    bind_s: float = 120.0
    """From the Attach to open lanes."""
    transfer_s: float = 60.0
    """For the bytes of one piece, once its header is there."""
    liveness_s: float = 1800.0
    """A trainer that sends nothing for so long is gone: longer than the longest training step."""
    commit_s: float = 120.0
    """From the enqueued commit to all ranks' replies. After it the engine is reported stuck; it is not touched."""
    manifest_s: float = 60.0
    """Gates that commit in parts: from the first part of a version to its manifest. After it the engine says that it is
    mixed, and takes the next complete version whole."""
    idle_uses: float = 1.0
    """Gate `idle_experts`: a unit is cold when its experts were chosen less often than this. What was counted up to one
    version ago counts half, up to two versions ago a quarter, and so on."""
    early_units: int = 16
    """Gate `idle_experts`: most units that one call makes live before the rest of their version."""
    detach_s: float = 60.0
    """How long the end of training waits for the last version to become live."""
    compare_slice_s: float = 0.05
    """Longest time that one worker call of the comparison at attach takes away from decoding."""
    poll_s: float = 0.25
    """How often deadlines are looked at."""
    retry_s: float = 5.0
    """How often a control plane is tried that was away too long for the attachment; for as long as the engine lives."""

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.staging_device):
            raise ValueError(f"engine setting staging_device is {self.staging_device!r}; give cpu, or a GPU as cuda:0")
        check_settings(self, "engine setting")
