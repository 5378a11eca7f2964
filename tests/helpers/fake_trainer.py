"""A trainer without Megatron: flat buffers that hold whatever version they are told to."""

from __future__ import annotations

from megastream.layout.shard import RankLayout
from megastream.sync import TrainerSync
from tests.helpers.synthetic import FAMILY, empty_buffers, fill


class FakeTrainer:
    library = "fake"
    family = FAMILY

    def __init__(self, layout: RankLayout, version: int = 0) -> None:
        self.layout, self.buffers = layout, empty_buffers(layout)
        fill(layout, self.buffers, version)

    def describe(self) -> RankLayout:
        return self.layout


def train_step(sync: TrainerSync, trainer: FakeTrainer, version: int, content: int | None = None) -> None:
    """One step of a training loop: the weights become those of `content` (or of `version`) and go out."""
    sync.begin(version, train_step=version)
    fill(trainer.layout, trainer.buffers, version if content is None else content)
    for buffer in trainer.buffers:
        sync.final(buffer)
    sync.accept()
    sync.finish()
