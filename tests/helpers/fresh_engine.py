"""A fresh vLLM, started from the checkpoint that a run exported; answers the fixed prompts.

It serves no weight-transfer backend and nobody attaches; of the plugin only the CPU repairs are at work, without which
vLLM 0.32 does not run two stages on a CPU.

python -m tests.helpers.fresh_engine RUN_FOLDER     prints one JSON line
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megastream.rl.folder import EXPORTED, JOB_FILE
from megastream.rl.job import Job
from tests.helpers.segments import remove, segments_of

MARK = "ANSWERS "


async def _ask(job: Job) -> list[dict[str, Any]]:
    from megastream.rl.data import read_pairs
    from megastream.rl.engine_start import start_engine
    from megastream.rl.fixed import ask_fixed
    from megastream.rl.host import engine_arguments
    from megastream.rl.prepare import HELD_OUT_FILE

    arguments = engine_arguments(job)
    arguments.model = str(job.results / EXPORTED)
    arguments.weight_transfer_config = None
    arguments.additional_config = {}
    engine = start_engine(arguments)
    try:
        return await ask_fixed(engine, read_pairs(job.results / HELD_OUT_FILE))
    finally:
        segments = segments_of(os.getpid())  # vLLM leaves them when it kills its workers
        engine.shutdown(timeout=10)
        remove(segments)


def fresh_answers(run_folder: Path, deadline_s: float) -> list[dict[str, Any]]:
    """The answers of a fresh engine in a process of its own."""
    from megastream.rl.launch import child_environment

    environment = {**os.environ, **child_environment(), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.fresh_engine", str(run_folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(lines[-1].removeprefix(MARK))


if __name__ == "__main__":
    print(MARK + json.dumps(asyncio.run(_ask(Job.read(Path(sys.argv[1]) / JOB_FILE)))))
