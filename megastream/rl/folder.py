"""The folder of a run's results: what may be put there, and what an earlier run left in it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

JOB_FILE = "job.json"
REFUSED_LOG = "refused-start.log"
"""What the last start wrote that was refused after it began; the results beside it are those of the run before."""

_WRITTEN = re.compile(
    r"(train|held_out|engine|answers|versions|trainer-\d+)\.jsonl|(prepare|host|trainer-\d+)\.log|"
    r"(records|summary)\.json|refused-start\.log"
)
"""Names of the files that a run writes beside its job file and its checkpoints."""

CHECKPOINT = "checkpoint"
EXPORTED = "exported"
"""The model after the last checked version, as a Hugging Face checkpoint."""

_CHECKPOINT_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def refuse_foreign(folder: Path) -> None:
    """ValueError when the folder holds anything, and no run of this program wrote its job file there."""
    if (
        folder.is_dir()
        and any(path.name != REFUSED_LOG for path in folder.iterdir())
        and not _is_ours(folder / JOB_FILE)
    ):
        raise ValueError(
            f"{folder} is not empty and holds no results of a run; choose a new or an empty folder with --out"
        )


def forget_results(folder: Path) -> None:
    """Results of an earlier run would be mistaken for this one's. Only names that a run writes are touched."""
    for path in folder.iterdir():
        if _WRITTEN.fullmatch(path.name):
            path.unlink()
    for name in (CHECKPOINT, EXPORTED):
        _forget_checkpoint(folder / name)


def take_over(source: Path, target: Path) -> None:
    """Moves the files of a folder and of those in it to the same places below `target`; other files stay there."""
    target.mkdir(exist_ok=True)
    for path in list(source.iterdir()):
        if path.is_dir():
            take_over(path, target / path.name)
        else:
            shutil.move(path, target / path.name)


def _forget_checkpoint(folder: Path) -> None:
    if not folder.is_dir():
        return
    for name in _CHECKPOINT_FILES:
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def _is_ours(path: Path) -> bool:
    try:
        job = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(job, dict) and job.keys() >= {"run_id", "engine", "control_url", "config"}
