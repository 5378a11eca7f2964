"""The experts of two checkpoints over an engine, in turns: overlays of one attachment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megastream.families import family_of
from megastream.families.types import ModelShape
from megastream.plan.types import Plan
from megastream.protocol.control import ControlLog
from megastream.rl.swap_job import MODEL, OTHER
from megastream.sync import TrainerSync
from megastream.sync.swap import engine_to_swap, swap_settings
from megastream.trainer.checkpoint_experts import CheckpointExperts, ExpertId, expert_tensors, shape_of


def choose_experts(shape: ModelShape, count: int, seed: int) -> list[ExpertId]:
    """So many experts of every layer that has some, the same ones for the same seed. ValueError: not so many."""
    if count > shape.num_experts:
        raise ValueError(f"swap.experts has {count}; a layer of this model has {shape.num_experts}")
    is_moe, found = family_of(shape).is_moe, []
    for layer in [layer for layer in range(shape.num_layers) if is_moe(shape, layer)]:
        chosen = np.random.default_rng((seed, layer)).permutation(shape.num_experts)[:count]
        found += [(layer, int(expert)) for expert in sorted(chosen)]
    return found


def check_models(folders: dict[str, Path], counts: Sequence[int], seed: int) -> ModelShape:
    """The served model's shape. ValueError when a model's config.json cannot be read or does not have so many experts,
    or when the experts of the two are of different shapes."""
    shapes = {name: shape_of(folder) for name, folder in folders.items()}
    for count in counts:
        chosen = choose_experts(shapes[MODEL], count, seed)
        one, other = (expert_tensors(family_of(shape), shape, chosen) for shape in shapes.values())
        if one != other:
            raise ValueError(f"{folders[MODEL]} and {folders[OTHER]} have experts of different shapes or types")
    return shapes[MODEL]


class SwapSender:
    """Blocks; one thread at a time. Raises what TrainerSync raises, and ValueError for checkpoints that do not fit."""

    def __init__(self, log: ControlLog, engine: str, folders: dict[str, Path], experts: list[ExpertId]) -> None:
        self._log, self._engine = log, engine
        self._sent = CheckpointExperts(folders[MODEL], experts)
        self._held = {name: CheckpointExperts(folder, experts).buffers for name, folder in folders.items()}
        self._sync: TrainerSync | None = None
        self.contents: dict[int, str] = {}
        """What every version has; also the one below all of them."""

    @property
    def plan(self) -> Plan:
        return self._attached.plan

    def attach(self, deadline_s: float) -> None:
        """The base is what the engine serves already: the model's own experts once more."""
        target = engine_to_swap(self._log, self._engine, deadline_s)
        settings = swap_settings(target.name, deadline_s)
        self._sync = TrainerSync(self._log, rank=0, world_size=1, trainer=self._sent, settings=settings)
        version = self._sync.attach(over=target.live).version
        self.contents |= {target.live: MODEL, version: MODEL}

    def send(self, content: str, emission_s: float, deadline_s: float) -> int:
        """The next version, with these experts; they leave one behind the other. Returns when it is live."""
        sync, version = self._attached, self._attached.next_version
        self.contents[version] = content
        sync.begin(version, train_step=version)
        for name, tensor in self._sent.buffers.items():
            tensor.copy_(self._held[content][name])
        sync.accept()
        begin_s, count = time.monotonic(), len(self._sent.buffers)
        for number, name in enumerate(self._sent.buffers):
            time.sleep(max(0.0, begin_s + emission_s * number / count - time.monotonic()))
            sync.final(name)
        sync.finish()
        sync.wait_committed(version, deadline_s)
        return version

    def end(self) -> None:
        """The engine is free for the next attachment."""
        self._attached.finished("swapped")
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._sync is not None:
            self._sync.close()

    @property
    def _attached(self) -> TrainerSync:
        if self._sync is None:
            raise ValueError("no swap before attach")
        return self._sync
