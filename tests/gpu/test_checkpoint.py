"""Checkpoints of a trainer on CUDA: what resumes is the training that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_checkpoint import SAVE_AT, save_and_resume


@pytest.mark.parametrize(("settings", "ranks"), [(dict(clip=0.3), 1), (dict(pp=2, clip=0.3), 2)])
def test_resume_in_the_same_layout_is_exact(tmp_path: Path, settings: dict[str, Any], ranks: int) -> None:
    whole, resumed = save_and_resume(tmp_path, settings, settings, (ranks, ranks))
    for one, other in zip(whole, resumed, strict=True):
        assert other["same_layout"]
        assert other["trace"] == one["trace"][SAVE_AT:]
        assert other["digest"] == one["digest"]
