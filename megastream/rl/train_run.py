"""The training of `megastream train` on one rank: from weights or a checkpoint, with or without an engine."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megastream.families import family_of, load_shape
from megastream.families.types import ModelShape
from megastream.rl.facts import Position, facts_of, layout_of
from megastream.rl.job import LineLog
from megastream.rl.place import Place
from megastream.rl.rows import Rows
from megastream.rl.schedule import learning_rate
from megastream.rl.start_lines import print_start
from megastream.rl.streaming import Streaming, ownership_of
from megastream.rl.train_config import NEWEST, NONE, TrainConfig
from megastream.trainer.adapter import MegatronAdapter, mesh_coords
from megastream.trainer.agreement import AgreedError, gather, together
from megastream.trainer.checkpoint import Checkpointer
from megastream.trainer.checkpoint_types import CheckpointSettings, Resumed, Saved
from megastream.trainer.compat import check_version
from megastream.trainer.config import TrainerConfig, check_layout
from megastream.trainer.model import TokenBatch, build, start_mesh, train_step
from megastream.trainer.stepper import StepResult

LOG_FILE = "train.jsonl"


@dataclass
class Trainer:
    """What a rank has once it is up. `step`, `sequences` and `skipped` count from 0; `version` is the checkpoint's."""

    config: TrainConfig
    launch: str
    rows: Rows
    chunks: list[Any]
    optimizer: Any
    adapter: MegatronAdapter
    checkpoints: Checkpointer | None
    lines: LineLog | None
    step: int = 0
    sequences: int = 0
    skipped: int = 0
    version: int = -1
    coords: dict[str, int] = field(default_factory=mesh_coords)

    def say(self, **line: Any) -> None:
        """One line of the log, on rank 0. Every rank calls it: AgreedError on all when it cannot be written."""
        with together(OSError):
            if self.lines is not None:
                self.lines.write(**line)


def train(config: TrainConfig, place: Place) -> None:
    """Blocks until `run.steps` are done. Every rank calls it.

    AgreedError, equal on all ranks, for what is wrong before an engine is asked for, with gradients that nothing can
    be taken back for, or with a checkpoint; a save under way is published first. What ends one rank alone leaves it.
    """
    trainer = start(config, place)
    try:
        _begin(trainer)
        streaming = Streaming(config, trainer.adapter, trainer.launch)
        try:
            streaming.attach(trainer.step, trainer.version)
            _run(trainer, streaming)
        except AgreedError:
            streaming.close()  # engines need not wait for files
            _publish_what_was_saved(trainer)
            raise
        finally:
            streaming.close()
        trainer.say(kind="end", step=trainer.step, unix_s=time.time())
        dist.barrier()
    finally:
        if trainer.checkpoints is not None:
            trainer.checkpoints.close()
        if trainer.lines is not None:
            trainer.lines.close()
    dist.destroy_process_group()


def start(config: TrainConfig, place: Place) -> Trainer:
    """Model, optimizer and data of this rank, still with random weights. Collective."""
    torch.set_num_threads(1)
    place.meet(config.group_s)
    with together(ValueError, OSError):
        shape, settings = _model_of(config, place)
    start_mesh(settings, deadline_s=config.group_s)
    with together(ValueError, OSError):
        rows = Rows(Path(config.data.file), config.data.seq_length, shape.vocab, config.run.seed)
        rows.check(place.rank, place.world_size)
        facts = {**facts_of(config, settings), "data": rows.facts()}
    with together(ValueError, AssertionError):
        chunks, optimizer = build(settings)
        adapter = MegatronAdapter(
            chunks,
            optimizer,
            family_of(shape),
            shape,
            bucket_elements=config.bucket_elements,
            finality=config.finality,
            experts_per_unit=config.experts_per_unit,
            ownership=ownership_of(config)[0],
        )
    launch = gather(secrets.token_hex(4))[0]
    lines = None
    with together(OSError):
        if place.rank == 0:
            Path(config.run.folder).mkdir(parents=True, exist_ok=True)
            lines = LineLog(Path(config.run.folder) / LOG_FILE)
    return Trainer(
        config, launch, rows, chunks, optimizer, adapter, _checkpointer(config, chunks, optimizer, launch, facts), lines
    )


def _model_of(config: TrainConfig, place: Place) -> tuple[ModelShape, TrainerConfig]:
    """ValueError says what of it is wrong on this rank: its node may have other files than the next one."""
    if place.world_size != config.ranks:
        raise ValueError(
            f"{place.world_size} ranks were started, the file's rendezvous has {config.ranks}; make the two equal"
        )
    check_version()
    try:
        shape = load_shape(Path(config.weights))
        settings = config.trainer(shape)
        check_layout(settings, place.world_size)
    except (ValueError, OSError) as error:
        raise ValueError(f"weights {config.weights}: {error}") from error
    return shape, settings


def _checkpointer(
    config: TrainConfig, chunks: list[Any], optimizer: Any, launch: str, facts: dict[str, Any]
) -> Checkpointer | None:
    if config.checkpoint is None:
        return None
    settings = CheckpointSettings(keep=config.checkpoint.keep, deadline_s=config.deadlines.save_s, launch=launch)
    folder = config.checkpoint_folder
    return Checkpointer(chunks, optimizer, folder, settings, facts=facts, layout=layout_of(config))


def _begin(trainer: Trainer) -> None:
    """Loads where to begin: a checkpoint, or the Hugging Face weights."""
    resumed, swept = _load(trainer) if trainer.checkpoints is not None else (None, [])
    if resumed is None:
        with together(ValueError, OSError):
            trainer.adapter.load_hf(trainer.config.weights)
    elif not resumed.weights_only:
        position = Position.of(resumed)
        trainer.step, trainer.sequences = resumed.step, position.sequences
        trainer.skipped, trainer.version = position.skipped, position.version
    trainer.say(
        kind="start",
        launch=trainer.launch,
        step=trainer.step,
        resumed=None if resumed is None else str(resumed.path),
        refused=[] if resumed is None else list(resumed.refused),
        swept=swept,
        same_layout=resumed is not None and resumed.same_layout,
        ranks=trainer.config.ranks,
        unix_s=time.time(),
    )
    if trainer.lines is not None:
        print_start(trainer.config, resumed, trainer.step)


def _load(trainer: Trainer) -> tuple[Resumed | None, list[str]]:
    section = trainer.config.checkpoint
    assert trainer.checkpoints is not None and section is not None
    swept = trainer.checkpoints.open()
    if section.load == NONE:
        trainer.checkpoints.refuse_any()
        return None, swept
    which = None if section.load == NEWEST else Path(section.load)
    resumed = trainer.checkpoints.load(allow_changed=section.allow_changed) if trainer.config.own_first else None
    if resumed is None and which is not None:
        allowed = ("optimizer", "batch", "run", "data") if section.weights_only else section.allow_changed
        resumed = trainer.checkpoints.load(which, allow_changed=allowed, weights_only=section.weights_only)
    return resumed, swept


def _run(trainer: Trainer, streaming: Streaming) -> None:
    config = trainer.config
    steps, skipped = config.run.steps - trainer.step, trainer.skipped
    stepper = trainer.adapter.stepper(config.finality, streaming.listener, max_abort_rate=config.max_abort_rate)
    while trainer.step < config.run.steps:
        begin = time.perf_counter()
        rate = learning_rate(config.optimizer, trainer.step)
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate
        loss = _forward_backward(trainer)
        result = stepper.step()
        version = streaming.end(result.ok)
        trainer.step += 1
        trainer.sequences += config.batch.global_sequences
        trainer.skipped += not result.ok
        _write_step(trainer, result, loss, rate, begin, version=version, **streaming.cost())
        _save(trainer, streaming.version)
        _publish(trainer)
    stepper.close()
    _publish(trainer, wait=True)  # before engines can still go wrong: training is done
    streaming.finished()
    if 0 < steps == trainer.skipped - skipped:
        raise AgreedError(
            f"nothing was trained: gradients were not finite in every one of {steps} steps, and all were skipped; the "
            f"lines above name the buckets; look at data, weights and learning_rate"
        )


def _forward_backward(trainer: Trainer) -> float | None:
    config, coords = trainer.config, trainer.coords
    micro = config.batch.micro_sequences
    return train_step(
        trainer.chunks,
        _micro_batches(trainer),
        num_microbatches=config.batch.global_sequences // (coords["dp_size"] * micro),
        seq_length=config.data.seq_length,
        micro_batch_size=micro,
    )


def _micro_batches(trainer: Trainer) -> Iterator[TokenBatch]:
    batch, coords = trainer.config.batch, trainer.coords
    rows = trainer.rows.step(
        trainer.sequences, batch.global_sequences, batch.micro_sequences, coords["dp"], coords["dp_size"]
    )
    return (TokenBatch(torch.from_numpy(tokens)) for tokens in rows)


def _write_step(
    trainer: Trainer, result: StepResult, loss: float | None, rate: float, begin: float, **streamed: Any
) -> None:
    """Every rank calls it: the loss is the mean over the replicas."""
    mine = loss if loss is not None and trainer.coords["tp"] == 0 else None
    losses = [part for part in gather(mine) if part is not None]
    trainer.say(
        kind="step",
        step=trainer.step,
        loss=sum(losses) / len(losses),
        grad_norm=result.grad_norm,
        learning_rate=rate,
        ok=result.ok,
        step_ms=(time.perf_counter() - begin) * 1e3,
        **streamed,
    )


def _save(trainer: Trainer, version: int) -> None:
    section = trainer.config.checkpoint
    if trainer.checkpoints is None or section is None:
        return
    if trainer.step % section.every_steps == 0 or trainer.step == trainer.config.run.steps:
        _publish(trainer, wait=True)
        trainer.say(kind="save", step=trainer.step, unix_s=time.time())
        position = Position(trainer.sequences, trainer.skipped, max(trainer.version, version))
        trainer.checkpoints.save(trainer.step, asdict(position))


def _publish(trainer: Trainer, *, wait: bool = False) -> None:
    saved: Saved | None = trainer.checkpoints.poll(wait=wait) if trainer.checkpoints is not None else None
    if saved is not None:
        trainer.say(
            kind="saved",
            step=saved.step,
            path=str(saved.path),
            bytes=saved.num_bytes,
            blocked_ms=1e3 * saved.blocked_s,
            total_ms=1e3 * saved.total_s,
            removed=list(saved.removed),
        )


def _publish_what_was_saved(trainer: Trainer) -> None:
    """Behind an error of all ranks, which stays the one that ends the training. Every rank calls it; blocks."""
    try:
        _publish(trainer, wait=True)
    except AgreedError as error:
        if trainer.lines is not None:
            print(f"megastream: {error}", file=sys.stderr)
