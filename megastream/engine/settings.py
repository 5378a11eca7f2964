"""What can be set on the engine side."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megastream.plan.tiers import StagingBudget
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
    staging: StagingBudget = StagingBudget()
    """Bytes that all sets together may take on `staging_device`, which then has to be the weights' own, and in host
    memory. Nothing of what lies in host memory is prepared before its commit: a smaller copy for a longer gap. What
    fits in neither is pulled from the trainer inside the commit. Without a budget everything lies on `staging_device`
    and is prepared."""
    bind_s: float = 120.0
    """From the Attach to open lanes."""
    transfer_s: float = 60.0
    """For the bytes of one piece, once its header is there."""
    liveness_s: float = 1800.0
    """A trainer that sends nothing for so long is gone: longer than the longest training step."""
    commit_s: float = 120.0
    """From the enqueued commit to all ranks' replies. After it the engine is reported stuck; it is not touched. What a
    commit pulls has half of this to come; after that the engine is poisoned."""
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
        if not isinstance(self.staging, StagingBudget):
            raise ValueError(f"engine setting staging must be a StagingBudget, got {self.staging!r}")
        check_settings(self, "engine setting")


def read_engine_settings(given: Any, *, device: str, staging_device: str) -> EngineSettings:
    """Settings as they stand in a host's config, where `device` holds the weights: staging is page-locked for a GPU
    unless said otherwise, and lies on `staging_device`, or with a budget on `device`. ValueError names key and remedy.
    """
    where = "megastream.settings in --additional-config"
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be an object, got {given!r}")
    refuse_unknown(given, EngineSettings, "megastream.settings")
    settings: dict[str, Any] = {"pin_memory": device != "cpu", "staging_device": staging_device, **given}
    if "staging" in given:
        budget = given["staging"]
        if not isinstance(budget, dict):
            raise ValueError(f"{where}: staging must be an object, got {budget!r}")
        refuse_unknown(budget, StagingBudget, "megastream.settings.staging")
        if "staging_device" in given:
            raise ValueError(
                f"{where} has staging_device={given['staging_device']!r} beside staging, whose device is the weights' "
                "own; leave staging_device out"
            )
        settings |= {"staging": StagingBudget(**budget), "staging_device": device}
    return EngineSettings(**settings)


def refuse_unknown(given: Mapping[str, Any], kind: type, where: str) -> None:
    """ValueError names a key that is no field of the dataclass `kind`, and the nearest one that is."""
    known = [field.name for field in fields(kind)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise ValueError(f"unknown key {where}.{key} in --additional-config; the nearest known key is {near}")
