"""Small trainings of `megastream train`: their files, ranks that a test can kill, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from megastream.rl.train_config import parse_train_config
from megastream.rl.train_run import LOG_FILE, Place, train
from megastream.trainer.agreement import AgreedError
from megastream.trainer.checkpoint_folder import Manifest, faults
from megastream.trainer.config import TrainerConfig
from tests.helpers import ranks
from tests.helpers.forked import forked
from tests.helpers.tiny import SEQUENCE, hf_config, hf_dtype, hf_shapes, tiny_config

STEPS = 8


def write_files(folder: Path, tiny: Callable[..., TrainerConfig] = tiny_config, **model: Any) -> None:
    """`weights/`, a Hugging Face checkpoint of the tiny model, and `tokens.npy`."""
    config = tiny(**model)
    weights = folder / "weights"
    weights.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in hf_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        value = 1 + 0.1 * noise if "norm" in name else noise * 0.1
        tensors[name] = value.to(hf_dtype(config, name))
    save_file(tensors, weights / "model.safetensors")
    (weights / "config.json").write_text(json.dumps({**hf_config(config), "torch_dtype": "bfloat16"}))
    np.save(folder / "tokens.npy", np.random.default_rng(3).integers(0, config.vocab, 4000, dtype=np.int32))


def job(folder: Path, **changes: Any) -> dict[str, Any]:
    """The configuration of 8 steps on PP=2 x EP=2, a checkpoint every 2; `section__key=value` changes it."""
    raw: dict[str, Any] = {
        "run": {"id": "test", "folder": str(folder / "run"), "steps": STEPS, "seed": 4},
        "rendezvous": {"ranks_per_node": 4},
        "weights": str(folder / "weights"),
        "bucket_elements": 6000,
        "data": {"file": str(folder / "tokens.npy"), "seq_length": SEQUENCE},
        "layout": {"pp": 2, "ep": 2},
        "batch": {"global_sequences": 8, "micro_sequences": 2},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3, "decay": "cosine", "decay_steps": 20, "clip_grad": 0.5},
        "checkpoint": {"every_steps": 2, "keep": 2},
        "deadlines": {"start_s": 40, "attach_s": 40, "step_s": 60, "save_s": 30, "reconnect_s": 30},
    }
    for name, value in changes.items():
        *path, key = name.split("__")
        section = raw
        for part in path:
            section = section.setdefault(part, {})
        section[key] = value
    return raw


def write_config(folder: Path, raw: dict[str, Any]) -> Path:
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def body(rank: int, world_size: int, init_method: str, raw: dict[str, Any]) -> str:
    """The whole training of one rank; what all ranks agreed is wrong, or nothing."""
    try:
        train(parse_train_config(raw), Place(rank, world_size, init_method))
    except AgreedError as error:
        return str(error)
    return ""


def run(raw: dict[str, Any], num_ranks: int = 4, timeout_s: float = 90.0) -> list[str]:
    """All ranks to their end; each one's word of what is wrong."""
    return ranks.run_ranks(body, num_ranks, raw=raw, timeout_s=timeout_s)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Of the run's log; a line that a kill cut off is left out."""
    path, found = folder / "run" / LOG_FILE, []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def trace(folder: Path) -> dict[int, set[tuple[float, float]]]:
    """Step -> every (loss, gradient norm) that was ever logged for it."""
    found: dict[int, set[tuple[float, float]]] = {}
    for line in lines(folder):
        if line["kind"] == "step":
            found.setdefault(line["step"], set()).add((line["loss"], line["grad_norm"]))
    return found


def whole_checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints under a final name, every file of which is as its manifest says; oldest first."""
    steps = []
    for path in (folder / "run" / "checkpoints").glob("step_*"):
        manifest = Manifest.read(path)
        assert list(faults(path, manifest.files.items())) == [], path
        steps.append(manifest.step)
    return sorted(steps)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob(".*-*"))


@dataclass
class Running:
    """Ranks that go on in the background."""

    processes: list[BaseProcess]
    folder: Path

    def kill(self, rank: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> list[int | None]:
        """Exit codes; None for a rank that has not ended, which is then killed."""
        end = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes

    def wait_for(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        """Until `reached`; False when the ranks have ended before."""
        end = time.monotonic() + timeout_s
        while not reached():
            if not any(process.is_alive() for process in self.processes):
                return reached()
            assert time.monotonic() < end, "not reached in time"
            time.sleep(0.002)
        return True


def begin(raw: dict[str, Any], scratch: Path, num_ranks: int = 4, body: Callable[..., Any] = body) -> Running:
    """The same ranks as `run`, left to themselves; their results and logs lie in `scratch`, an empty folder."""
    scratch.mkdir()
    context = forked()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments = (body, num_ranks, str(scratch), 120.0, {"raw": raw})
    processes: list[BaseProcess] = [
        context.Process(target=ranks._rank, args=(rank, *arguments)) for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return Running(processes, scratch)
