"""`megastream train` with files that cannot be used, a rank that hangs, and a start that began elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

from megastream.rl.train_run import LOG_FILE
from megastream.trainer import compat_checkpoint
from tests.distributed.test_train import ONE, prepared, refused
from tests.helpers.ranks import run_ranks
from tests.helpers.train_job import body, job, lines, run, whole_checkpoints, write_files


@pytest.mark.full
def test_a_training_that_began_with_another_ones_checkpoint_goes_on_from_its_own(tmp_path: Path) -> None:
    """The same file at every start; what it saves in between is neither made again nor lost."""
    folder = prepared(tmp_path)
    changes = {"run__folder": str(tmp_path / "new" / "run"), "checkpoint__load": str(folder / "step_00000004")}
    for steps in (6, 8):
        assert run(job(tmp_path, **ONE, **changes, run__steps=steps), 1) == [""]
    starts = [line for line in lines(tmp_path / "new") if line["kind"] == "start"]
    assert [line["step"] for line in starts] == [4, 6]
    assert starts[1]["resumed"] == str(tmp_path / "new/run/checkpoints/step_00000006")
    assert whole_checkpoints(tmp_path / "new") == [6, 8]


@pytest.mark.full
def test_weights_and_data_that_cannot_be_used_are_refused_by_every_rank_in_the_same_words(tmp_path: Path) -> None:
    write_files(tmp_path)
    two = dict(layout__ep=2)
    weights = tmp_path / "weights/model.safetensors"
    good = weights.read_bytes()
    tensors = load(good)
    weights.write_bytes(good[: len(good) // 2])
    assert "model.safetensors cannot be read (" in refused(tmp_path, 2, **two)
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, weights)
    assert f"{name} in {tmp_path / 'weights'} has dtype F8_E4M3, and only BF16" in refused(tmp_path, 2, **two)
    weights.write_bytes(good)
    tokens = np.load(tmp_path / "tokens.npy")
    tokens[-1] = 102
    np.save(tmp_path / "tokens.npy", tokens)
    assert "trainer rank 1: data.file" in refused(tmp_path, 2, **two)


@pytest.mark.full
def test_a_full_disk_under_the_log_ends_all_ranks_with_one_word(tmp_path: Path) -> None:
    write_files(tmp_path)
    log = tmp_path / "run" / LOG_FILE
    log.parent.mkdir()
    log.symlink_to("/dev/full")
    two = {**ONE, "rendezvous__ranks_per_node": 2, "layout__ep": 2}
    assert run(job(tmp_path, **two), 2) == [f"[Errno 28] No space left on device: '{log}'"] * 2


def _hanging_save(rank: int, world_size: int, init_method: str, raw: dict[str, Any]) -> str:
    if rank == 1:
        compat_checkpoint.PlannedSave.write = lambda planned: time.sleep(60)  # type: ignore[method-assign]
    return body(rank, world_size, init_method, raw)


@pytest.mark.full
def test_the_deadline_that_names_a_rank_comes_before_the_one_of_collectives(tmp_path: Path) -> None:
    """The other rank stands in a collective all the while."""
    write_files(tmp_path)
    two = {**ONE, "rendezvous__ranks_per_node": 2, "layout__ep": 2}
    raw = job(tmp_path, **two, deadlines__step_s=5, deadlines__save_s=8)
    said = "the checkpoint of step 2 is not written by trainer rank 1 after 8 s; raise deadlines.save_s"
    assert run_ranks(_hanging_save, 2, raw=raw, timeout_s=60) == [said] * 2
