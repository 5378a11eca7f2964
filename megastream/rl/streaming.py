"""The engine side of a training that may have no engine: attach, and what surrounds a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megastream.control.redis_log import RedisLog
from megastream.layout.trainer import Ownership
from megastream.protocol.control import ControlError
from megastream.rl.train_config import TrainConfig
from megastream.rl.watermark import Watermark
from megastream.sync import Opening, TrainerSettings, TrainerSync
from megastream.trainer.adapter import MegatronAdapter
from megastream.trainer.agreement import gather, together
from megastream.trainer.ownership import ANY_TRANSPORT, choose_ownership
from megastream.trainer.stepper import Listener

WATERMARK_FILE = "versions.json"


def ownership_of(config: TrainConfig) -> tuple[Ownership, str]:
    """Which replica sends what, and why. An engine may come with any transport; weights on a CPU leave over gloo."""
    lanes = ANY_TRANSPORT if torch.cuda.is_available() else ("gloo",)
    return choose_ownership(config.ownership, config.finality, config.replicas, lanes)


class Streaming:
    """One per rank and start; every rank makes the same calls. Without a `stream` section all of them do nothing."""

    def __init__(self, config: TrainConfig, adapter: MegatronAdapter, launch: str) -> None:
        self._config, self._adapter, self._launch = config, adapter, launch
        self._log: RedisLog | None = None
        self._sync: TrainerSync | None = None
        self._watermark: Watermark | None = None

    @property
    def version(self) -> int:
        """The newest version that this training made; -1 without an engine."""
        return self._sync.next_version - 1 if self._sync is not None else -1

    def attach(self, train_step: int, resumed: int) -> None:
        """Binds to the engine and pushes the weights as they are now, numbered above all that was ever published.

        So an engine has the weights of a resumed training before its first step; `resumed` is the version that its
        checkpoint was saved at. Blocks; a deadline ends it.
        """
        stream, deadlines = self._config.stream, self._config.deadlines
        if stream is None:
            return
        with together(ControlError, ValueError, OSError):
            self._log = RedisLog(stream.control_url, self._config.run.id, reconnect_s=deadlines.reconnect_s)
            if dist.get_rank() == 0:
                self._watermark = Watermark(Path(self._config.run.folder) / WATERMARK_FILE)
                self._watermark.lift(self._log, resumed)
                self._watermark.reserve(self._log.highest_version() + 1)  # a block: the base, and the first steps'
        settings = TrainerSettings(
            launch=f"{self._config.run.id}-{self._launch}",
            engine=stream.engine,
            engines=stream.engines,
            late_joiners=stream.late_joiners,
            finality=self._config.finality,
            piece_bytes=int(stream.piece_mib * 2**20),
            experts_per_unit=self._config.experts_per_unit,
            slots_per_target=stream.slots_per_target,
            ready_s=deadlines.start_s,
            bind_s=deadlines.attach_s,
            attach_s=deadlines.attach_s,
            transfer_s=deadlines.step_s,
            lag_s=deadlines.lag_s,
            join_s=deadlines.join_s,
            alone_s=deadlines.alone_s,
            detach_s=deadlines.step_s,
        )
        self._sync = TrainerSync(
            self._log, rank=dist.get_rank(), world_size=dist.get_world_size(), trainer=self._adapter, settings=settings
        )
        self._sync.attach("stream", train_step=train_step)

    @property
    def listener(self) -> Listener:
        """For the stepper: what it says goes to the engine, or nowhere."""
        return self._sync.listener if self._sync is not None else Listener(lambda bucket: None)

    def end(self, ok: bool) -> int | None:
        """After the optimizer step: its version, or None when the step did not count or nothing is streamed."""
        if self._sync is None:
            return None
        if not ok:
            self._sync.skip()
            return None
        self._sync.accept()
        self._sync.finish()
        with together(OSError):
            if self._watermark is not None:
                self._watermark.reserve(self._sync.next_version)  # nobody can see it yet
        return self.version

    def cost(self) -> dict[str, Any]:
        """What engines cost the last step, over all ranks, and who took its version. Nothing without engines."""
        if self._sync is None:
            return {}
        ranks: list[Opening] = gather(self._sync.opening)
        return {
            "opening_ms": 1e3 * max(each.wait_s for each in ranks),
            "join_ms": 1e3 * max(each.join_s for each in ranks),
            "slot_wait_ms": 1e3 * max(each.slot_wait_s for each in ranks),
            "takes": list(ranks[0].takes),
            "joined": list(ranks[0].joined),
            "skipped": list(ranks[0].skipped),
            "withdrawn": sorted({engine for each in ranks for engine in each.withdrawn}),
        }

    def finished(self) -> None:
        """After the last step: waits until every engine has its version, then ends the attachments."""
        if self._sync is not None:
            self._sync.catch_up()
            self._sync.wait_committed(self.version, self._config.deadlines.step_s)
            self._sync.finished(f"{self._config.run.steps} steps are done")

    def close(self) -> None:
        """Idempotent. Without `finished` before, the engine is told that this trainer left."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        if self._log is not None:
            self._log.close()
            self._log = None
