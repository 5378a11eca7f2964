"""`megastream train` with gradients that are not finite: lines, exit codes and versions of its ranks."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megastream.control.embedded import EmbeddedServer
from megastream.protocol.records import Accepted, Committed, Failed
from megastream.rl import train_run
from megastream.rl.torchrun import run_train
from megastream.trainer.checkpoint_folder import Manifest
from megastream.trainer.compat_checkpoint import PlannedSave
from tests.distributed.test_train_nodes import free_address
from tests.distributed.test_train_streaming import engine, records
from tests.helpers.train_job import begin, job, lines, whole_checkpoints, write_config, write_files

BAD_STEP = 3
"""Counted from 1, as in the log."""
TWO = {"rendezvous__ranks_per_node": 2, "layout__pp": 1, "layout__ep": 2, "run__steps": 6, "checkpoint__every_steps": 3}


def _body(rank: int, world_size: int, init_method: str, raw: dict[str, Any]) -> None:
    """The command as torchrun starts it. On the last rank one weight's gradients in the bad step are not numbers."""
    host, port = raw["rendezvous"]["address"].split(":")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    build, forward_backward, poison = train_run.build, train_run._forward_backward, [0.0]

    def poisonous(settings: Any) -> Any:
        chunks, optimizer = build(settings)
        next(chunks[0].parameters()).register_hook(lambda grad: grad + poison[0])
        return chunks, optimizer

    def poisoned(trainer: train_run.Trainer) -> float | None:
        poison[0] = math.nan if trainer.step + 1 == BAD_STEP and rank == world_size - 1 else 0.0
        return forward_backward(trainer)

    train_run.build, train_run._forward_backward = poisonous, poisoned
    code = run_train(Path(raw["run"]["folder"]).parent / "train.yaml")
    sys.stderr.flush()
    os._exit(code)


def _slow_body(rank: int, world_size: int, init_method: str, raw: dict[str, Any]) -> None:
    """Likewise, and a save is written long after the next step."""
    write = PlannedSave.write

    def slow(planned: PlannedSave) -> None:
        time.sleep(1.5)
        write(planned)

    PlannedSave.write = slow  # type: ignore[method-assign]
    _body(rank, world_size, init_method, raw)


def train(folder: Path, body: Callable[..., None] = _body, **changes: Any) -> tuple[list[int | None], list[str]]:
    """Exit codes of the ranks, and what each of them printed."""
    raw = job(folder, **{**TWO, **changes}, rendezvous__address=free_address())
    write_config(folder, raw)
    codes = begin(raw, folder / "ranks", 2, body).wait(180)
    return codes, [(folder / "ranks" / f"{rank}.log").read_text() for rank in range(2)]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if line["kind"] == "step"]


@pytest.mark.full
@pytest.mark.parametrize("finality", ["whole", "pipelined", "speculative"])
def test_the_step_is_skipped_and_the_next_one_has_its_version(tmp_path: Path, finality: str) -> None:
    write_files(tmp_path)
    with EmbeddedServer(tmp_path / "s") as server, engine(server.url, "one", tmp_path / "weights") as lives:
        codes, said = train(tmp_path, finality=finality, stream__control_url=server.url)
        assert codes == [0, 0], said
        found = records(server.url)
    assert [(line["ok"], line["version"]) for line in steps(tmp_path)] == [
        (True, 1),
        (True, 2),
        (False, None),
        (True, 3),
        (True, 4),
        (True, 5),
    ]
    named = [re.findall(r"gradients are not finite in (.*)", each) for each in said]
    assert len(named[0]) == 1 and named[1] == [], "once, by rank 0"
    assert re.match(r"c0\.dense0\.b\d+.* \(.*weight\) on rank 1; the step is skipped", named[0][0])
    assert [(r.version, r.train_step) for r in found if isinstance(r, Accepted)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 4),
        (4, 5),
        (5, 6),
    ]
    committed = [r.version for r in found if isinstance(r, Committed)]
    assert committed == sorted(set(committed)) and committed[-1] == 5
    assert not [r for r in found if isinstance(r, Failed)]
    assert all(not bool(tensor.isnan().any()) for live in lives for tensor in live.buffers.values())
    assert whole_checkpoints(tmp_path) == [3, 6]
    saved = [Manifest.read(tmp_path / "run/checkpoints" / f"step_{step:08d}").state for step in (3, 6)]
    assert [(state["skipped"], state["version"]) for state in saved] == [(1, 2), (1, 5)]


@pytest.mark.full
def test_early_ends_with_one_line_and_what_was_saved_before(tmp_path: Path) -> None:
    """The save of the step before is under way when the training ends, and is published all the same."""
    write_files(tmp_path)
    settings = dict(finality="early", optimizer__clip_grad=0.0, checkpoint__every_steps=1)
    codes, said = train(tmp_path, _slow_body, **settings)
    assert codes == [1, 1], said
    ends = [[line for line in each.splitlines() if line.startswith("megastream: gradients")] for each in said]
    assert len(ends[0]) == 1 and ends[1] == []
    assert "on rank 1; other buckets were stepped before" in ends[0][0] and "use 'speculative'" in ends[0][0]
    assert "Traceback" not in said[0] + said[1]
    assert [line["step"] for line in steps(tmp_path)] == [1, 2]
    assert whole_checkpoints(tmp_path) == [1, 2]
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "saved"] == [1, 2]
