"""`megastream swap`: starts the control plane and the experiment's process, and writes what it found."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path

import msgspec

from megastream.control.embedded import EmbeddedServer
from megastream.rl.children import Child, Children
from megastream.rl.folder import JOB_FILE, refuse_foreign
from megastream.rl.job import read_lines
from megastream.rl.launch import child_environment, owning, refuse_unfit, size_of, status_of
from megastream.rl.owned import sweep
from megastream.rl.swap_config import SwapConfig, load_swap_config
from megastream.rl.swap_job import CASES_FILE, SwapJob, folders_of
from megastream.rl.swap_replay import recorded
from megastream.rl.swap_report import CSV_FILE, JSON_FILE, PAGE_FILE, line, write_results
from megastream.rl.swap_sender import check_models

LOG_NAME = "swap"


def run_swap(path: Path, out: Path | None) -> int:
    """Runs a configuration to its end; returns the exit status of `status_of`."""
    folder = (out or Path("runs") / path.stem).absolute()
    return status_of(lambda: launch(load_swap_config(path), folder))


def launch(config: SwapConfig, folder: Path) -> None:
    """Runs all cases and writes the results into `folder`. Raises what ended the run; nothing is left then either."""
    for found in sweep(folder):
        print(f"swept from a run that died here: {found}")
    _refuse_other(folder)
    placed = _placed(config)
    shape = check_models(folders_of(placed), config.swap.experts, config.seed)
    recorded(placed, shape.vocab)
    folder.mkdir(parents=True, exist_ok=True)
    with owning(folder) as owner, ExitStack() as stack:
        refuse_unfit(owner.folder)
        server = stack.enter_context(EmbeddedServer(Path(owner.folder) / "control"))
        children = stack.enter_context(Children(folder, owner, config.deadlines.stop_s, child_environment()))
        children.adopt([Child("redis", server.pid, None)])
        job = SwapJob(
            run_id=owner.run_id,
            engine=f"engine-{owner.run_id[:8]}",
            control_url=server.url,
            run_folder=str(folder),
            config=placed,
        )
        rows = _run(job, children)
    write_results(folder, config, rows)
    print(f"results: {folder / PAGE_FILE}, {JSON_FILE}, {CSV_FILE}")


def _run(job: SwapJob, children: Children) -> list[dict[str, object]]:
    folder, deadlines = Path(job.run_folder), job.config.deadlines
    path, cases = folder / JOB_FILE, folder / CASES_FILE
    for name in (CASES_FILE, JSON_FILE, CSV_FILE, PAGE_FILE):
        (folder / name).unlink(missing_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(job), indent=1))
    said = 0

    def say() -> None:
        nonlocal said
        for row in read_lines(cases)[said:]:
            print(line(row), flush=True)
            said += 1

    host = children.start(LOG_NAME, "megastream.rl.swap_run", str(path))
    children.watch(
        until=lambda: host.ended,
        may_end=[host],
        deadline_s=deadlines.start_s + deadlines.case_s + 4 * deadlines.step_s,
        every=say,
        sign_of_life=lambda: size_of(cases),
    )
    say()
    return read_lines(cases)


def _placed(config: SwapConfig) -> SwapConfig:
    """With absolute paths, for a process that may stand elsewhere."""
    replay = config.replay
    if replay:
        replay = msgspec.structs.replace(replay, file=os.path.abspath(replay.file))
    model, other = (os.path.abspath(path) for path in (config.model, config.other))
    return msgspec.structs.replace(config, model=model, other=other, replay=replay)


def _refuse_other(folder: Path) -> None:
    """ValueError when the folder holds anything but an earlier run of this command."""
    refuse_foreign(folder)
    if (folder / JOB_FILE).exists() and "swap" not in json.loads((folder / JOB_FILE).read_text())["config"]:
        raise ValueError(f"{folder} holds the results of another command; choose a new or an empty folder with --out")
