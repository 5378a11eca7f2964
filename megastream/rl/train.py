"""One trainer rank: the same training several times over, each pass with another way to the engine.

python -m megastream.rl.train JOB RANK
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from megastream.control.redis_log import RedisLog
from megastream.families import ModelShape, family_of, load_shape
from megastream.protocol.control import ControlError
from megastream.rl.data import Batches, read_pairs
from megastream.rl.job import Job, LineLog, Notes, Pass, passes_of
from megastream.rl.prepare import TRAIN_FILE
from megastream.sync import SyncError, TrainerSettings, TrainerSync
from megastream.trainer.adapter import MegatronAdapter
from megastream.trainer.compat import forget_moments
from megastream.trainer.config import TrainerConfig
from megastream.trainer.model import TokenBatch, build, start_process_group, train_step
from megastream.trainer.policies import Finality
from megastream.trainer.stepper import StepResult


@dataclass(frozen=True)
class Rank:
    """What stays the same in all passes of one rank."""

    job: Job
    rank: int
    chunks: list[Any]
    optimizer: Any
    adapter: MegatronAdapter
    batches: Batches
    log: RedisLog
    notes: Notes
    lines: LineLog


def trainer_config(job: Job, shape: ModelShape) -> TrainerConfig:
    """The trainer room's own config, from the run's."""
    trainer = job.config.trainer
    return TrainerConfig.of(
        shape,
        max_sequence=job.config.data.seq_length,
        tp=trainer.tp,
        pp=trainer.pp,
        ep=trainer.ep,
        lr=trainer.learning_rate,
        clip=trainer.clip_grad,
        seed=job.config.seed,
    )


def finality_of(job: Job, one: Pass) -> Finality:
    """The whole-model way takes the stock step; the streamed one what the file says."""
    return "whole" if one.mode == "whole" else job.config.stream.finality


def run_pass(rank: Rank, one: Pass) -> None:
    """A whole training from the checkpoint, with fresh moments. All ranks call it; blocks."""
    rank.adapter.load_hf(rank.job.checkpoint)
    forget_moments(rank.optimizer)
    if one.mode == "stock":
        _train_stock(rank, one)
    else:
        _train_attached(rank, one)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    rank.lines.write(kind="final", name=one.name, rank=rank.rank, digest=_digest(rank.chunks), peak_mib=peak_mib)


def _train_stock(rank: Rank, one: Pass) -> None:
    """Stock DDP, stock `optimizer.step()`: what the two other ways must equal bit for bit."""

    _mark(rank, one, "begin")
    for index in range(one.updates):
        begin = time.perf_counter()
        loss = _forward_backward(rank, index)
        ok, norm, _ = rank.optimizer.step()
        _write_step(rank, one, index, -1, loss, StepResult(bool(ok), float(norm)), begin, time.time())
    _mark(rank, one, "end")


def _train_attached(rank: Rank, one: Pass) -> None:
    config = rank.job.config
    settings = TrainerSettings(
        launch=f"{rank.job.run_id}-{one.name}",
        engine=rank.job.engine,
        finality=finality_of(rank.job, one),
        piece_bytes=int(config.stream.piece_mib * 2**20),
        experts_per_unit=config.stream.experts_per_unit,
        slots_per_target=config.stream.slots_per_target,
        ready_s=config.deadlines.start_s,
        bind_s=config.deadlines.attach_s,
        attach_s=config.deadlines.attach_s,
        transfer_s=config.deadlines.step_s,
        lag_s=config.deadlines.step_s,
        detach_s=config.deadlines.step_s,
    )
    sync = TrainerSync(
        rank.log, rank=rank.rank, world_size=config.trainer.ranks, trainer=rank.adapter, settings=settings
    )
    try:
        _train_synced(rank, one, sync)
    finally:
        sync.close()


def _train_synced(rank: Rank, one: Pass, sync: TrainerSync) -> None:
    attached = sync.attach("whole" if one.mode == "whole" else "stream")
    stream = rank.job.config.stream
    stepper = rank.adapter.stepper(finality_of(rank.job, one), sync.listener, max_abort_rate=stream.max_abort_rate)
    _mark(rank, one, "begin", base=attached.version, attachment=attached.attachment)
    made: list[int] = []
    for index in range(one.updates):
        begin = time.perf_counter()
        loss = _forward_backward(rank, index)
        result = stepper.step()
        final_unix_s = time.time()
        if not result.ok:
            sync.skip()
            _write_step(rank, one, index, -1, loss, result, begin, final_unix_s, **_waits(sync))
            continue
        version = sync.next_version
        made.append(version)
        sync.accept()
        sync.finish()
        _write_step(rank, one, index, version, loss, result, begin, final_unix_s, **_waits(sync))
        if one.checked:
            _have_checked(rank, sync, version)
    stepper.close()
    last = made[-1] if made else attached.version
    if made:
        sync.wait_committed(last, rank.job.config.deadlines.step_s)
    _mark(rank, one, "end", last=last)
    if one.checked:
        if rank.rank == 0:
            rank.notes.leave(f"trained/{one.name}", base=attached.version, last=last)
        rank.notes.wait(f"enough/{one.name}", 10 * rank.job.config.deadlines.step_s, "the engine's last answers")
    sync.finished(f"pass {one.name} is done")


def _have_checked(rank: Rank, sync: TrainerSync, version: int) -> None:
    """Shows the host this rank's raw parameters of a live version, and waits until they were compared."""
    deadline_s = rank.job.config.deadlines.step_s
    sync.wait_committed(version, deadline_s)
    path = rank.adapter.save_raw(rank.job.temp / f"raw-{version}")
    rank.notes.leave(f"raw/{version}/{rank.rank}", path=str(path))
    rank.notes.wait(f"checked/{version}", deadline_s, f"the comparison of version {version} with the engine")


def _forward_backward(rank: Rank, index: int) -> float | None:
    trainer = rank.job.config.trainer
    return train_step(
        rank.chunks,
        _micro_batches(rank, index),
        num_microbatches=trainer.num_micro_batches,
        seq_length=rank.job.config.data.seq_length,
        micro_batch_size=trainer.micro_batch,
    )


def _micro_batches(rank: Rank, index: int) -> Iterator[TokenBatch]:
    from megastream.trainer.adapter import mesh_coords

    coords, trainer = mesh_coords(), rank.job.config.trainer
    rows = rank.batches.step(
        index,
        dp_rank=coords["dp"],
        dp_size=coords["dp_size"],
        num_micro_batches=trainer.num_micro_batches,
        micro_batch=trainer.micro_batch,
    )
    return (TokenBatch(torch.from_numpy(tokens)) for tokens in rows)


def _waits(sync: TrainerSync) -> dict[str, float]:
    """What emission costs: the step's wait before weights could change, and the packing thread's waits for a slot."""
    last, opening_ms = sync.reports[-1], sync.opening.wait_s * 1e3
    return {"opening_ms": opening_ms, "slot_wait_ms": last.wait_s * 1e3, "slot_wait_version": last.version}


def _write_step(
    rank: Rank,
    one: Pass,
    index: int,
    version: int,
    loss: float | None,
    result: StepResult,
    begin: float,
    final: float,
    **waits: float,
) -> None:
    rank.lines.write(
        kind="step",
        name=one.name,
        rank=rank.rank,
        step=index,
        version=version,
        loss=loss,
        grad_norm=result.grad_norm,
        step_ms=(time.perf_counter() - begin) * 1e3,
        final_unix_s=final,
        **waits,
    )


def _mark(rank: Rank, one: Pass, what: str, **facts: Any) -> None:
    """Rank 0 says when a pass begins and ends; everybody starts together."""
    dist.barrier()
    if rank.rank == 0:
        rank.lines.write(kind=what, name=one.name, unix_s=time.time(), **facts)


def _digest(chunks: list[Any]) -> str:
    """One number for all parameter bytes of this rank."""
    digest = xxhash.xxh3_64()
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            digest.update(name.encode())
            digest.update(param.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def train(job: Job, number: int) -> None:
    """Blocks until all passes of the run are done. Raises what ends the run."""
    config = job.config
    shape = load_shape(job.checkpoint)
    trainer = trainer_config(job, shape)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(config.trainer.deterministic)
    start_process_group(
        trainer,
        rank=number,
        world_size=config.trainer.ranks,
        init_method=f"file://{job.temp / 'trainer-group'}",
        deadline_s=2 * config.deadlines.step_s,  # one rank may wait step_s for the engine while others wait for it
    )
    log = RedisLog(job.control_url, job.run_id, reconnect_s=config.deadlines.reconnect_s)
    notes, lines = Notes(log), LineLog(job.results / f"trainer-{number}.jsonl")
    batches = Batches(read_pairs(job.results / TRAIN_FILE), config.data.seq_length, config.seed)
    chunks, optimizer = build(trainer)
    adapter = MegatronAdapter(
        chunks,
        optimizer,
        family_of(shape),
        shape,
        bucket_elements=config.trainer.bucket_elements,
        finality=config.stream.finality,
        experts_per_unit=config.stream.experts_per_unit,
        ownership=config.ownership[0],
    )
    rank = Rank(job, number, chunks, optimizer, adapter, batches, log, notes, lines)
    missing = "the engine to come up and generate; a busy machine needs longer: raise deadlines.start_s"
    notes.wait("generating", config.deadlines.start_s, missing)
    for one in passes_of(config):
        run_pass(rank, one)
    lines.close()
    dist.barrier()
    dist.destroy_process_group()
    log.close()


def main(arguments: list[str]) -> int:
    number = int(arguments[1])
    try:
        train(Job.read(Path(arguments[0])), number)
    except (SyncError, ControlError, TimeoutError, ValueError, RuntimeError) as error:
        print(f"trainer rank {number}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
