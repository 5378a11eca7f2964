"""What a child of the launcher is before its program starts."""

from __future__ import annotations

import os
import subprocess

import pytest

from megastream.rl.children import AUTOGROUP, before_program


@pytest.mark.skipif(not os.access(AUTOGROUP, os.W_OK), reason="this kernel does not schedule by session")
def test_niceness_reaches_the_session_too() -> None:
    """Without it a nice engine in a session of its own takes as much of a core as the trainer does."""
    out = subprocess.run(
        ["sh", "-c", "cat /proc/self/autogroup; nice"],
        preexec_fn=before_program(os.getpid(), 7),
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stdout.split()
    assert out[-3:] == ["nice", "7", str(min(os.nice(0) + 7, 19))]
