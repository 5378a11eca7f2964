"""tools/soak.py as a person starts it, with few updates: too few to judge memory, enough for all the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_hundred_updates_leave_nothing_behind(tmp_path: Path) -> None:
    options = ["--updates", "100", "--every", "5", "--kib-per-update", "100", "--alone-s", "5"]
    options += ["--json", str(tmp_path / "soak.json")]
    done = subprocess.run(
        [sys.executable, "-m", "tools.soak", *options], cwd=ROOT, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing grew, nothing moved, no token was mixed or mislabelled" in done.stdout
    found = json.loads((tmp_path / "soak.json").read_text())
    assert [one["updates"] for one in found["samples"]] == [*range(5, 105, 5)]
    assert [one["updates"] for one in found["alone"]] == [100] * 20
    assert found["wrong"] == [] and found["tokens"]["tokens"] > 1000
