"""What `megastream train` says on standard error before its first step."""

from __future__ import annotations

import sys

from megastream.rl.streaming import ownership_of
from megastream.rl.train_config import TrainConfig
from megastream.trainer.checkpoint_types import Resumed
from megastream.trainer.ownership import described
from megastream.trainer.policies import consequences


def print_start(config: TrainConfig, resumed: Resumed | None, step: int) -> None:
    """Where the training begins and what its choices mean; for rank 0 alone."""
    said = [f"passed over: {reason}" for reason in (resumed.refused if resumed is not None else ())]
    said.append(consequences(config.finality, config.optimizer.clip_grad, config.max_abort_rate))
    if config.stream is not None:
        said.append(described(*ownership_of(config)))
    if layers := config.layout.mtp_layers:
        said.append(f"layers of multi-token prediction: {layers}, trained and saved, used by no engine")
    begin = config.weights if resumed is None else resumed.path
    said.append(f"step {step} of {config.run.steps}, from {begin}")
    for line in said:
        print(f"megastream: {line}", file=sys.stderr)
