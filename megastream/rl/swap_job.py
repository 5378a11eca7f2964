"""What the launcher of the swap experiment tells its process."""

from __future__ import annotations

from pathlib import Path

import msgspec

from megastream.rl.swap_config import SwapConfig

CASES_FILE = "cases.jsonl"
MODEL, OTHER = "model", "other"
"""Whose experts a version has."""


class SwapJob(msgspec.Struct, frozen=True, kw_only=True):
    """Written by the launcher. Paths are absolute, those of the models too."""

    run_id: str
    engine: str
    control_url: str
    run_folder: str
    config: SwapConfig

    @property
    def folders(self) -> dict[str, Path]:
        return folders_of(self.config)


def folders_of(config: SwapConfig) -> dict[str, Path]:
    return {MODEL: Path(config.model), OTHER: Path(config.other)}
