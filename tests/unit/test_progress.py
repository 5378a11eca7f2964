"""What the launcher's terminal shows besides figures."""

from __future__ import annotations

import logging
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megastream.control.embedded import EmbeddedServer
from megastream.rl import config as configs
from megastream.rl.job import Job
from megastream.rl.progress import Progress

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_a_control_plane_that_goes_away_is_said_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the table, while standard error keeps the one line that ends a run."""
    monkeypatch.setattr(logging.getLogger("megastream"), "propagate", False)  # pytest's own handler
    config = configs.load(CONFIG)
    shown = StringIO()
    with EmbeddedServer(tmp_path / "control") as server:
        folder = str(tmp_path)
        job = Job(
            run_id="run", engine="e", control_url=server.url, run_folder=folder, temp_folder=folder, config=config
        )
        with Progress(job, Console(file=shown, width=200)) as progress:
            progress.update()
            server.stop()
            progress.update()
    assert "is away" in shown.getvalue() and "reconnecting" in shown.getvalue()
    assert capsys.readouterr().err == ""
