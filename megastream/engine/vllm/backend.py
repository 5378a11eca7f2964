"""The out-of-tree weight transfer backend `megastream`, built by vLLM in every worker after the model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from megastream.engine.vllm import compat, compat_core, cpu_repairs, hooks
from megastream.engine.vllm.live import VllmLiveModel
from megastream.engine.vllm.worker import UNKNOWN_LABEL, Agent, RankState

logger = logging.getLogger("vllm.megastream")

NAME = "megastream"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: a trainer attaches over the control plane."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A paused whole update; `version` is the one that the attached trainer is emitting."""

    version: int = -1
    deadline_s: float = 600.0


class MegastreamEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Describes the live model and starts this rank's agent.

    Streamed versions do not pass through vLLM's update calls at all. Native start, update and finish are the paused
    whole update: the core lets them through only while the engine is paused and a trainer is attached, because a
    refusal raised here, in one of several workers, would shift the replies of all later calls.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module):
        super().__init__(config, vllm_config, device, model)
        compat.check_version()
        compat_core.check_methods()
        cpu_repairs.check()
        self.live = VllmLiveModel(model, vllm_config)
        self.state = RankState(self.live.rank, device)
        self.state.live = self.live
        self.state.agent = self.start_agent(self.live)
        self._failure = ""
        self._untouched = False
        """The last update was refused before it changed a weight."""

    def start_agent(self, live: VllmLiveModel) -> Agent | None:
        """Starts the agent that receives for this rank. The composition root overrides it; here there is none."""
        return None

    def session(self) -> dict[str, Any]:
        """What the core asks before and after a native call."""
        agent = self.state.agent
        kind = agent.attached_kind if agent is not None else None
        return {"kind": kind or "", "failure": self._failure, "untouched": self._untouched}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do: see InitInfo."""

    def start_weight_update(self) -> None:
        self._failure = ""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives all tensors of one version and reloads the model from them. Blocking; paused engine only.

        The base class would wait for an accelerator afterwards, which a CPU has not. Failures are kept for `session`.
        """
        with hooks.Guard() as guard, torch.no_grad():
            self.receive_weights(self.parse_update_info(update_info))
        self._failure = guard.error

    def receive_weights(self, update_info: UpdateInfo) -> None:
        agent = self.state.agent
        self._untouched = True
        if agent is None or agent.attached_kind != "whole":
            raise RuntimeError("no trainer is attached with kind whole; it left, or another one came")
        self._untouched = False
        self.state.label = UNKNOWN_LABEL
        agent.load_whole(update_info.version, update_info.deadline_s)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.state.label = str(update_info.version)

    def finish_weight_update(self) -> None:
        """Nothing to do: a version is whole or has failed when `update_weights` returns."""

    def shutdown(self) -> None:
        if self.state.agent is not None:
            self.state.agent.close()
            self.state.agent = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        """Abstract in vLLM 0.26 only. Our trainer side is megastream.sync.TrainerSync."""
        raise NotImplementedError("megastream's trainer side is megastream.sync.TrainerSync")
