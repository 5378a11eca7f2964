"""The engine host: vLLM answers questions here without a break, while trainers come, update it, and go.

    python -m megastream.rl.host JOB

Streamed updates need nothing of this process: they go past it, from trainer ranks into vLLM's workers. It pauses the
engine for the whole-model way, and in checked passes it compares the live bytes with the trainer's.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from megastream.control.redis_log import RedisLog
from megastream.protocol.control import ControlError
from megastream.protocol.records import Attach, Committed, Failed, Poisoned, Record
from megastream.rl.answers import Answering
from megastream.rl.checking import Checker
from megastream.rl.checkpoint import tensor_shapes
from megastream.rl.data import read_pairs
from megastream.rl.engine_start import forget_wakeup_fd, start_engine
from megastream.rl.fixed import ask_fixed
from megastream.rl.floor import engine_floor
from megastream.rl.folder import EXPORTED
from megastream.rl.job import Job, LineLog, Notes, Pass, passes_of
from megastream.rl.prepare import HELD_OUT_FILE
from megastream.sync import EngineSync, EngineSyncSettings, SyncError, WholeUpdate

ENGINE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "single": {},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


def engine_arguments(job: Job) -> AsyncEngineArgs:
    """What would stand on the command line of `vllm serve`."""
    engine = job.config.engine
    plugin = {
        "control_url": job.control_url,
        "run_id": job.run_id,
        "engine": job.engine,
        "transport": job.config.stream.transport,
        "reconnect_s": job.config.deadlines.reconnect_s,
        "records": True,
        "settings": engine_settings(job),
    }
    return AsyncEngineArgs(
        model=str(job.checkpoint),
        dtype="bfloat16",
        seed=job.config.seed,
        enforce_eager=not torch.cuda.is_available(),  # graphs do not exist on CPU
        max_model_len=engine.max_model_len,
        max_num_seqs=2 * engine.streams,
        kv_cache_memory_bytes=engine.kv_cache_mib << 20,
        enable_prefix_caching=False,
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend="megastream"),
        additional_config={"megastream": plugin},
        **ENGINE_ARGUMENTS[engine.layout],
    )


def engine_settings(job: Job) -> dict[str, float]:
    """The run's deadlines under the engine's names for them."""
    deadlines = job.config.deadlines
    steps = dict.fromkeys(("transfer_s", "commit_s", "detach_s"), deadlines.step_s)
    return {"bind_s": deadlines.attach_s, **steps}


class Host:
    """One engine and what this process does around it."""

    def __init__(self, job: Job, engine: AsyncLLM, log: RedisLog) -> None:
        self._job, self._engine, self._log = job, engine, log
        self._notes = Notes(log)
        self._sync = EngineSync(log, engine=job.engine)
        load = EngineSyncSettings(load_s=job.config.deadlines.step_s)
        self._whole = EngineSync(log, engine=job.engine, settings=load)
        self._lines = LineLog(job.results / "engine.jsonl")
        self._answers = LineLog(job.results / "answers.jsonl")
        self._pairs = read_pairs(job.results / HELD_OUT_FILE)
        self._answering = Answering(
            engine,
            self._pairs,
            self._answers,
            self._lines,
            answer_tokens=job.config.engine.answer_tokens,
            seed=job.config.seed,
        )
        self._checker = Checker(job, engine, self._notes)
        self._passes = [one for one in passes_of(job.config) if one.mode != "stock"]
        self._pass: Pass | None = None
        self._base = -1
        self._records: asyncio.Queue[Record] = asyncio.Queue()

    async def run(self, stop: asyncio.Event) -> None:
        """Generates until `stop`; raises when the engine dies or an update fails."""
        loop = asyncio.get_running_loop()
        await self._write_engine()
        self._answering.start(self._job.config.engine.streams)
        while self._answering.num_tokens == 0:
            self._raise_errors(self._answering.tasks)
            await asyncio.sleep(0.05)
        self._notes.leave("generating")
        reader = threading.Thread(target=self._read, args=(loop,), name="host-log", daemon=True)
        reader.start()
        work = [asyncio.create_task(part()) for part in (self._follow, self._update_whole, self._conclude_checked)]
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([*work, *self._answering.tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        self._raise_errors([*work, *self._answering.tasks])
        self._sync.stop()
        self._whole.stop()
        await self._answering.stop()
        await self._write_records()
        for task in work:
            task.cancel()

    async def _write_engine(self) -> None:
        """What the engine consists of, from vLLM's own parameters."""
        replies = await self._engine.collective_rpc("megastream_call", args=("inventory", {}))
        floor = engine_floor(replies, self._job.config.engine_ranks)
        shapes = dict(tensor_shapes(self._job.config.model))
        self._lines.write(
            kind="engine",
            bytes_floor=floor.num_bytes,
            tensors=floor.num_tensors,
            unused=floor.unused,
            padding=floor.padding,
            hf_tensors=len(shapes),
            params=sum(prod(shape) for shape in shapes.values()),
        )

    def _raise_errors(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            if task.done():
                task.result()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        def hand_over(record: Record) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._records.put_nowait, record)

        try:
            for record in self._sync.events():
                hand_over(record)
        except ControlError as error:
            hand_over(Failed(attachment="", side="engine", rank=-1, reason=str(error)))

    async def _follow(self) -> None:
        while True:
            record = await self._records.get()
            match record:
                case Attach():
                    self._pass, self._base = self._passes.pop(0), record.base_version
                    self._lines.write(kind="attach", name=self._pass.name, attachment=record.attachment)
                case Committed() if self._pass is not None and self._pass.checked and record.version > self._base:
                    await self._check(self._pass, record.version)
                case Poisoned():
                    raise SyncError(f"engine {record.engine} is poisoned by version {record.version}: {record.reason}")
                case Failed():
                    who = record.side if record.rank < 0 else f"{record.side} rank {record.rank}"
                    raise SyncError(f"{who} failed: {record.reason}")

    async def _check(self, one: Pass, version: int) -> None:
        """Compares a live version byte for byte."""
        checked = await self._checker.check(version)
        self._lines.write(kind="check", name=one.name, **checked)
        self._notes.leave(f"checked/{version}", **checked)

    async def _conclude_checked(self) -> None:
        """After the last step of each checked pass: waits for enough tokens, asks the fixed prompts, exports."""
        for one in [one for one in passes_of(self._job.config) if one.checked]:
            while (trained := self._notes.look(f"trained/{one.name}")) is None:
                await asyncio.sleep(0.1)
            while self._tokens_between(trained["base"], trained["last"]) < self._job.config.run.checked_tokens:
                await asyncio.sleep(0.1)
            async with self._answering.quiet(self._job.config.deadlines.step_s):
                answers = await ask_fixed(self._engine, self._pairs)
            self._lines.write(kind="fixed", name=one.name, version=trained["last"], answers=answers)
            await asyncio.to_thread(self._checker.export, self._job.results / EXPORTED)
            self._notes.leave(f"enough/{one.name}")
        await asyncio.Event().wait()  # a part of the work that ends, ends the host

    def _tokens_between(self, base: int, last: int) -> int:
        """Tokens of finished answers that versions of one pass made, its base among them."""
        counts = self._answering.tokens_by_version.items()
        return sum(count for label, count in counts if label.isdecimal() and base <= int(label) <= last)

    async def _update_whole(self) -> None:
        """The whole-model way, through every attachment of that kind."""

        def write(update: WholeUpdate) -> None:
            self._lines.write(kind="whole", **{field: getattr(update, field) for field in update.__slots__})

        for one in [one for one in passes_of(self._job.config) if one.mode == "whole"]:
            await self._whole.run_whole_updates(self._engine, write)
            self._lines.write(kind="detached", name=one.name)
        await asyncio.Event().wait()

    async def _write_records(self) -> None:
        records = await self._engine.engine_core.call_utility_async("megastream_records")
        (self._job.results / "records.json").write_bytes(msgspec.json.encode(records))
        self._answers.close()
        self._lines.close()


async def serve(job: Job) -> None:
    """Starts the engine and hosts it until SIGTERM. The engine is shut down in any case."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    forget_wakeup_fd()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log = RedisLog(job.control_url, job.run_id, reconnect_s=job.config.deadlines.reconnect_s)
    engine = start_engine(engine_arguments(job))
    try:
        await Host(job, engine, log).run(stop)
    finally:
        engine.shutdown(timeout=job.config.deadlines.stop_s / 2)
        log.close()


def main(arguments: list[str]) -> int:
    try:
        asyncio.run(serve(Job.read(Path(arguments[0]))))
    except (
        SyncError,
        ControlError,
        EngineDeadError,
        EngineGenerateError,
        TimeoutError,
        ValueError,
        RuntimeError,
    ) as error:
        print(f"engine host: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
