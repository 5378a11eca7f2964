"""The process of the swap experiment: vLLM with its requests, and the cases one behind the other.

python -m megastream.rl.swap_run JOB
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import msgspec
import torch
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from megastream.control.redis_log import RedisLog
from megastream.families import load_shape
from megastream.protocol.control import ControlError
from megastream.protocol.records import Failed, Poisoned, Record
from megastream.rl.engine_start import forget_wakeup_fd, start_engine
from megastream.rl.host import ENGINE_ARGUMENTS
from megastream.rl.job import LineLog
from megastream.rl.swap_config import Case, cases_of
from megastream.rl.swap_figures import Answer, Measured, figures
from megastream.rl.swap_job import CASES_FILE, MODEL, OTHER, SwapJob
from megastream.rl.swap_replay import recorded
from megastream.rl.swap_sender import SwapSender, choose_experts
from megastream.rl.swap_traffic import Traffic, make_prompts, rescore
from megastream.sync import EngineSync, EngineSyncSettings, SyncError

REPLAYED_AT_ONCE = 256
"""Most requests of a replay that a step of the engine has; others wait in its queue."""


def engine_arguments(job: SwapJob) -> AsyncEngineArgs:
    """What would stand on the command line of `vllm serve`."""
    engine, deadlines = job.config.engine, job.config.deadlines
    times = dict.fromkeys(("bind_s", "transfer_s", "commit_s", "detach_s", "manifest_s"), deadlines.step_s)
    plugin = {
        "control_url": job.control_url,
        "run_id": job.run_id,
        "engine": job.engine,
        "reconnect_s": deadlines.reconnect_s,
        "expert_use": True,
        "settings": {"idle_uses": engine.idle_uses, "early_units": engine.early_units, **times},
    }
    return AsyncEngineArgs(
        model=job.config.model,
        dtype="bfloat16",
        seed=job.config.seed,
        enforce_eager=not torch.cuda.is_available(),  # graphs do not exist on CPU
        max_model_len=engine.max_model_len,
        max_num_seqs=2 * max(job.config.traffic.requests) if job.config.traffic else REPLAYED_AT_ONCE,
        kv_cache_memory_bytes=engine.kv_cache_mib << 20,
        enable_prefix_caching=False,
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend="megastream"),
        additional_config={"megastream": plugin},
        **ENGINE_ARGUMENTS[engine.layout],
    )


class Experiment:
    """Runs every case and writes its row."""

    def __init__(self, job: SwapJob, engine: AsyncLLM, log: RedisLog, lines: LineLog) -> None:
        self._job, self._config, self._engine, self._log, self._lines = job, job.config, engine, log, lines
        self._shape = load_shape(job.folders[MODEL])
        settings = EngineSyncSettings(load_s=job.config.deadlines.step_s)
        self._host = EngineSync(log, engine=job.engine, settings=settings)
        self._after, self._count = "0", 0

    async def run(self) -> None:
        """All cases, each within its deadline. TimeoutError names the one that was not."""
        for case in cases_of(self._config, 0):
            await self._limited(case, None)
        for experts in self._config.swap.experts:
            chosen = choose_experts(self._shape, experts, self._config.seed)
            sender = await asyncio.to_thread(SwapSender, self._log, self._job.engine, self._job.folders, chosen)
            try:
                await asyncio.to_thread(sender.attach, self._config.deadlines.step_s)
                for case in cases_of(self._config, experts):
                    await self._limited(case, sender)
                await asyncio.to_thread(sender.end)
            finally:
                await asyncio.to_thread(sender.close)

    async def _limited(self, case: Case, sender: SwapSender | None) -> None:
        limit_s = self._config.deadlines.case_s
        try:
            async with asyncio.timeout(limit_s):
                row = figures(await self._case(case, sender))
        except TimeoutError as error:
            raise TimeoutError(f"{case}: {str(error) or f'took over {limit_s:g} s'}") from error
        self._lines.write(**row)

    async def _case(self, case: Case, sender: SwapSender | None) -> Measured:
        """Traffic with or without swaps; then what each content gives the same tokens."""
        if sender is not None:
            await asyncio.to_thread(self._host.set_gate, case.gate)
        await self._records()
        begin_s = time.monotonic()
        answers = await self._traffic(case, sender)
        seconds = time.monotonic() - begin_s
        records = await self._records()
        rescored = await self._rescored(answers, sender)
        unit_bytes: dict[str, int] = {}
        contents = {0: MODEL}
        if sender is not None:
            pieces, contents = sender.plan.pieces, sender.contents
            for piece in pieces:
                unit_bytes[piece.unit] = unit_bytes.get(piece.unit, 0) + piece.num_bytes
        return Measured(case, answers, seconds, records, unit_bytes, contents, rescored)

    async def _traffic(self, case: Case, sender: SwapSender | None) -> list[Answer]:
        config, limit_s = self._config, self._config.deadlines.step_s
        self._count += 1
        traffic = Traffic(self._engine, config.seed, f"c{self._count}")
        self._ask(case, traffic)
        for number in range(config.swap.swaps):
            await traffic.wait_for(config.swap.tokens_between, limit_s)
            if sender is not None:
                content = MODEL if number % 2 else OTHER
                await asyncio.to_thread(sender.send, content, config.swap.emission_s, limit_s)
        await traffic.wait_for(config.swap.tokens_between, limit_s)
        await traffic.stop()
        return traffic.answers

    def _ask(self, case: Case, traffic: Traffic) -> None:
        live, vocab = self._config.traffic, self._shape.vocab
        if live and case.requests and case.skew is not None:
            prompts = make_prompts(live.prompts, live.prompt_tokens, vocab, self._config.seed)
            traffic.live(prompts, case.requests, case.skew, live.answer_tokens)
        elif case.speed:
            traffic.replay(recorded(self._config, vocab), case.speed)

    async def _rescored(self, answers: list[Answer], sender: SwapSender | None) -> dict[str, list[tuple[float, ...]]]:
        """In an engine that does nothing else. The model's experts are live before and behind."""
        found = {MODEL: await rescore(self._engine, answers, f"r{self._count}")}
        if sender is not None:
            limit_s = self._config.deadlines.step_s
            await asyncio.to_thread(sender.send, OTHER, 0.0, limit_s)
            found[OTHER] = await rescore(self._engine, answers, f"o{self._count}")
            await asyncio.to_thread(sender.send, MODEL, 0.0, limit_s)
        return found

    async def _records(self) -> list[Record]:
        """Those since the last call. SyncError for one that says that something failed."""
        found: list[Record] = []
        while entries := await asyncio.to_thread(self._log.read, self._after, 0.05):
            self._after = entries[-1][0]
            found += [record for _, record in entries]
        for record in found:
            if isinstance(record, Failed | Poisoned):
                raise SyncError(f"engine {self._job.engine}: {record.reason}")
        return found


async def run(job: SwapJob) -> None:
    """Starts the engine and runs the experiment. The engine is shut down in any case."""
    forget_wakeup_fd()
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    engine = start_engine(engine_arguments(job))
    log = RedisLog(job.control_url, job.run_id, reconnect_s=job.config.deadlines.reconnect_s)
    lines = LineLog(Path(job.run_folder) / CASES_FILE)
    try:
        await Experiment(job, engine, log, lines).run()
    finally:
        engine.shutdown(timeout=job.config.deadlines.stop_s / 2)
        lines.close()
        log.close()


def main(arguments: list[str]) -> int:
    try:
        asyncio.run(run(msgspec.json.decode(Path(arguments[0]).read_bytes(), type=SwapJob)))
    except asyncio.CancelledError:
        return 1
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
