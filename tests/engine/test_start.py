"""How an engine's processes begin on a CPU: forked where no other thread can be in the way, else anew; and in
each of them the plugin has to be loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.helpers.engine import ENVIRONMENT, ROOT, Engine

forks_on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM itself forks or not with GPUs")

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


@forks_on_cpu
def test_a_process_with_a_second_thread_is_not_forked() -> None:
    command, environment = [sys.executable, "-c", LOOK], {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False"]


@forks_on_cpu
def test_a_core_that_began_anew_forks_its_workers(attachable: Engine) -> None:
    assert set(attachable.run(attachable.ranks("feed_process"))) == {"ForkProcess"}
    assert [type(core).__name__ for core in attachable.cores()] == ["SpawnProcess"]


@pytest.mark.parametrize(
    ("owner_pid", "is_rust"), [(0, False), (os.getpid(), False), (1, True)], ids=["nobody", "the core itself", "Rust"]
)
def test_a_front_end_without_the_plugin_is_no_front_end(
    owner_pid: int, is_rust: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hand answers out whose records nobody has checked: the core does not start, and names the remedy."""
    from megastream import vllm_entry
    from megastream.engine.vllm import compat, compat_metrics

    monkeypatch.setattr(compat_metrics, "owner_pid", lambda: owner_pid)
    monkeypatch.setattr(compat, "rust_front_end", lambda: is_rust)
    with pytest.raises(RuntimeError, match="not loaded in vLLM's front end, .*let VLLM_PLUGINS name megastream"):
        vllm_entry._confirm_front_end()


def test_a_front_end_with_the_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from megastream import vllm_entry
    from megastream.engine.vllm import compat, compat_metrics

    said: list[str] = []
    monkeypatch.setattr(compat_metrics, "owner_pid", lambda: 1)
    monkeypatch.setattr(compat, "rust_front_end", lambda: False)
    monkeypatch.setattr(vllm_entry.logger, "info", lambda words, *values: said.append(words % values))
    vllm_entry._confirm_front_end()
    version = vllm_entry.__version__
    assert said == [f"megastream {version} is loaded in front end 1, engine core {os.getpid()} and all workers"]


def test_the_page_says_which_process_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from megastream.engine.vllm import compat_metrics

    monkeypatch.delenv(compat_metrics._VARIABLE, raising=False)
    assert compat_metrics.owner_pid() == 0
    monkeypatch.setenv(compat_metrics._VARIABLE, "/proc/4711/fd/9")
    assert compat_metrics.owner_pid() == 4711
