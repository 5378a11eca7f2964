"""The first process of a run: writes checkpoint and data, so that both halves start from the same files.

python -m megastream.rl.prepare JOB
"""

from __future__ import annotations

import sys
from pathlib import Path

from megastream.rl.checkpoint import random_tensors, write_checkpoint
from megastream.rl.data import Batches, make_pairs, refuse_long_questions, write_pairs
from megastream.rl.job import Job

TRAIN_FILE, HELD_OUT_FILE = "train.jsonl", "held_out.jsonl"


def prepare(job: Job) -> None:
    """Writes `checkpoint/`, `train.jsonl` and `held_out.jsonl`. No question is in both."""
    data = job.config.data
    pairs = make_pairs(data.task, data.train + data.held_out, job.config.seed)
    Batches(pairs[data.held_out :], data.seq_length, job.config.seed)  # refuses what the trainer ranks could not use
    engine = job.config.engine
    refuse_long_questions(pairs[: data.held_out], engine.answer_tokens, engine.max_model_len)
    write_pairs(job.results / HELD_OUT_FILE, pairs[: data.held_out])
    write_pairs(job.results / TRAIN_FILE, pairs[data.held_out :])
    write_checkpoint(job.checkpoint, job.config.model, random_tensors(job.config.model, job.config.seed))


def main(arguments: list[str]) -> int:
    try:
        prepare(Job.read(Path(arguments[0])))
    except ValueError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
