"""How an engine's processes begin on a CPU: forked where no other thread can be in the way, else anew."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.helpers.engine import ENVIRONMENT, ROOT, Engine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM itself forks or not with GPUs")

LOOK = """
import threading
from megastream.rl.engine_start import may_fork
alone, go_on = may_fork(), threading.Event()
other = threading.Thread(target=go_on.wait)
other.start()
print(alone, may_fork())
go_on.set()
other.join()
"""


def test_a_process_with_a_second_thread_is_not_forked() -> None:
    command, environment = [sys.executable, "-c", LOOK], {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_a_core_that_began_anew_forks_its_workers(attachable: Engine) -> None:
    assert set(attachable.run(attachable.ranks("feed_process"))) == {"ForkProcess"}
    assert [type(core).__name__ for core in attachable.cores()] == ["SpawnProcess"]
