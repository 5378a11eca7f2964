"""The launcher: starts what a run consists of, watches it, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec.structs import replace

from megastream.control.embedded import EmbeddedServer
from megastream.control.login import LOGIN, split_login
from megastream.control.redis_log import RedisLog
from megastream.protocol.control import ControlError
from megastream.rl import config as configs
from megastream.rl.bounds import ranks_refusal
from megastream.rl.children import Child, Children, RunFailed
from megastream.rl.folder import JOB_FILE, REFUSED_LOG, forget_results, refuse_foreign, take_over
from megastream.rl.job import Job
from megastream.rl.owned import MARK, Owner, StillRunning, clean, make_folder, start_time, sweep, this_place
from megastream.rl.sections import ConfigError
from megastream.trainer.ownership import described
from megastream.trainer.policies import consequences

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
"""Exit statuses; the last is that after Ctrl-C."""

_LONGEST_TEMPORARY_BYTES = 55


def run_quickstart(path: Path, out: Path | None, *, redis_url: str | None, engine_layout: str | None) -> int:
    """Runs a configuration to its end; returns the exit status of `status_of`."""

    def run() -> None:
        config = configs.load(path)
        if engine_layout is not None:
            config = configs.with_engine_layout(config, engine_layout)
        launch(config, (out or Path("runs") / path.stem).absolute(), redis_url)

    return status_of(run)


def status_of(run: Callable[[], None]) -> int:
    """Exit status of a run that reports its errors: 0, 1, 2 for a file that cannot be used, INTERRUPTED.

    What ended it is one line on standard error.
    """
    try:
        run()
    except KeyboardInterrupt:
        print("megastream: interrupted; everything was stopped", file=sys.stderr)
        return INTERRUPTED
    except (ControlError, RunFailed, StillRunning, ValueError, OSError, subprocess.SubprocessError) as error:
        print(f"megastream: {error}", file=sys.stderr)
        return REFUSED if isinstance(error, ConfigError) else FAILED
    return 0


def launch(config: configs.Config, folder: Path, redis_url: str | None) -> None:
    """Runs all passes and writes the results into `folder`. Raises what ended the run; nothing is left then either."""
    if reason := ranks_refusal(config.trainer.ranks):
        raise ValueError(reason)
    for found in sweep(folder):
        print(f"swept from a run that died here: {found}")
    refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with owning(folder) as owner, ExitStack() as stack:
        refuse_unfit(owner.folder)
        url, servers = "", []
        if redis_url is not None:
            url = stack.enter_context(_login(redis_url))
        else:
            server = stack.enter_context(EmbeddedServer(Path(owner.folder) / "control"))
            url, servers = server.url, [Child("redis", server.pid, None)]
        RedisLog(url, owner.run_id, reconnect_s=config.deadlines.reconnect_s).close()  # refuses a server that is away
        # Entered last, so that it ends first: children may still need the control plane to say goodbye.
        children = stack.enter_context(Children(folder, owner, config.deadlines.stop_s, child_environment()))
        children.adopt(servers)
        job = Job(
            run_id=owner.run_id,
            engine=f"engine-{owner.run_id[:8]}",
            control_url=url,
            run_folder=str(folder),
            temp_folder=owner.folder,
            config=config,
        )
        _run(job, children, config)


def _run(job: Job, children: Children, config: configs.Config) -> None:
    from megastream.rl.progress import Progress
    from megastream.rl.summary import refuse_wrong, write_summary

    stream = config.stream
    print(consequences(stream.finality, config.trainer.clip_grad, stream.max_abort_rate), flush=True)
    print(described(*config.ownership), flush=True)
    path = _prepare(job, children)
    host = children.start("host", "megastream.rl.host", str(path), nice=config.engine.nice)
    ranks = [
        children.start(
            f"trainer-{rank}", "megastream.rl.train", str(path), str(rank), environment=_trainer_environment(config)
        )
        for rank in range(config.trainer.ranks)
    ]
    with Progress(job) as progress:
        children.watch(
            until=lambda: all(rank.ended for rank in ranks),
            may_end=ranks,
            deadline_s=_silence_s(config.deadlines),
            every=progress.update,
            sign_of_life=lambda: [size_of(job.results / f"{rank.name}.jsonl") for rank in ranks],
        )
        progress.catch_up()
        host.terminate()
        stop_s = 2 * config.deadlines.stop_s
        children.watch(until=lambda: host.ended, may_end=[host], deadline_s=stop_s, every=progress.update)
    summary = write_summary(job)
    progress.report(summary)
    refuse_wrong(summary)


def _prepare(job: Job, children: Children) -> Path:
    """Makes the run's files aside, then puts them in the place of the last run's; returns the job file.

    Not before: whatever refuses to start leaves the last run's results alone.
    """
    aside = job.temp / "prepared"
    aside.mkdir()
    first = aside / JOB_FILE
    replace(job, run_folder=str(aside)).write(first)
    deadline_s = job.config.deadlines.start_s
    children.run_to_end("prepare", "megastream.rl.prepare", str(first), deadline_s=deadline_s, log_name=REFUSED_LOG)
    first.unlink()
    shutil.move(job.results / REFUSED_LOG, aside / "prepare.log")
    path = job.results / JOB_FILE
    job.write(path)
    forget_results(job.results)
    take_over(aside, job.results)
    return path


def _silence_s(deadlines: configs.DeadlineConfig) -> float:
    """Trainer ranks that write nothing for so long are stuck: their own waits all end earlier, and say for whom."""
    return deadlines.start_s + deadlines.attach_s + 12 * deadlines.step_s


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def owning(folder: Path) -> Iterator[Owner]:
    """A temporary folder and an owner file, with a guard that outlives us; all gone afterwards."""
    run_id = uuid.uuid4().hex
    started = start_time(os.getpid())
    assert started is not None, "this process has no entry in /proc"
    owner = Owner(run_id, os.getpid(), started, str(make_folder(run_id)), place=this_place())
    owner.write(folder)
    guard = subprocess.Popen(
        [sys.executable, "-m", "megastream.rl.guard", str(folder)], stdin=subprocess.PIPE, start_new_session=True
    )
    os.environ[MARK] = run_id
    try:
        yield owner
    finally:
        del os.environ[MARK]
        clean(folder, owner)
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


@contextmanager
def _login(redis_url: str) -> Iterator[str]:
    """The URL that may be written down; user and password reach this process and its children by environment only."""
    try:
        url, login = split_login(redis_url)
    except ControlError as error:
        raise ControlError(f"--redis-url: {error}") from error
    if not login:
        yield url
        return
    os.environ[LOGIN] = login
    try:
        yield url
    finally:
        del os.environ[LOGIN]


def refuse_unfit(folder: str) -> None:
    """vLLM's sockets lie in the temporary folder, under names of up to 50 bytes, and 107 fit in all.

    torch and vLLM also write its path into file:// URLs, unquoted on both sides: there # and ? would end it.
    """
    num_bytes = len(os.fsencode(folder))
    if num_bytes > _LONGEST_TEMPORARY_BYTES:
        raise ValueError(
            f"the temporary folder {folder} has {num_bytes} bytes, and sockets in it leave room for "
            f"{_LONGEST_TEMPORARY_BYTES}; set TMPDIR to a shorter one"
        )
    if any(char in "#?" or not char.isprintable() for char in folder):
        raise ValueError(f"the temporary folder {folder!r} has characters that end a URL; set TMPDIR to another one")


def _trainer_environment(config: configs.Config) -> dict[str, str]:
    """cuBLAS keeps one order of summation only with workspaces of a fixed size (its manual, "Reproducibility")."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if config.trainer.deterministic else {}


def child_environment() -> dict[str, str]:
    """What all children get besides their own: one thread each, no network, no usage statistics."""
    # Compiled helpers want a C++ compiler on CPU; on a GPU the engine's graphs need them.
    on_cpu = {} if Path("/proc/driver/nvidia").exists() else {"TORCH_COMPILE_DISABLE": "1"}
    return {
        **on_cpu,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONUNBUFFERED": "1",
        # vLLM renames its processes; without this the new name would be written over the environment and its mark.
        "SPT_NOENV": "1",
    }
