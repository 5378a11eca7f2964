"""What leaves before the norm is known is not shown: a whole provisional version lies sealed in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megastream.rl import oracle
from megastream.trainer.config import TrainerConfig
from tests.distributed.test_adapter import random
from tests.helpers.provisional import body, engine_side
from tests.helpers.ranks import run_ranks
from tests.helpers.synthetic import region
from tests.helpers.tiny import gathered, tiny_config, tiny_glm4

CONFIG = tiny_config(pp=2, layers=2, clip=0.3, lr=0.05)
WITH_BIAS = tiny_glm4(pp=2, layers=2, clip=0.3, lr=0.05, router_bias_rate=0.3)


def _run(
    tmp_path: Path, poisoned: tuple[bool, ...], broken: bool = False, config: TrainerConfig = CONFIG
) -> tuple[list[Any], dict[str, Any]]:
    save_file(random(config), tmp_path / "model.safetensors", metadata={"format": "pt"})
    *trainers, engine = run_ranks(
        body, config.pp + 1, config=config, folder=str(tmp_path), poisoned=poisoned, broken=broken, timeout_s=90
    )
    return trainers, engine


def _differing(tmp_path: Path, commit: int, version: int, config: TrainerConfig = CONFIG) -> list[str]:
    """Tensors that were live after this commit and are not what the trainer held after the step of `version`."""
    dumps = [oracle.read_dump(tmp_path / f"raw-{version}/rank{rank}.safetensors") for rank in range(config.pp)]
    expected = gathered(dumps, config)
    wrong = []
    for layout in engine_side(config):
        live = torch.load(tmp_path / f"live-{commit}-{layout.rank}.pt")
        for shard in layout.shards:
            slices = tuple(slice(lo, hi) for lo, hi in zip(shard.box.lo, shard.box.hi, strict=True))
            found = region(live[shard.buffer], shard)
            if not torch.equal(found, expected[shard.tensor][slices].to(found.dtype)):
                wrong.append(shard.tensor)
    return wrong


@pytest.mark.parametrize("config", [CONFIG, pytest.param(WITH_BIAS, marks=pytest.mark.full)], ids=["qwen3", "glm4"])
def test_no_provisional_version_is_shown(config: TrainerConfig, tmp_path: Path) -> None:
    """Every step is clipped, and one has a gradient that is not finite: its number is used by the next step.

    Routers' biases are moved by that step, too, and leave with the next one.
    """
    trainers, engine = _run(tmp_path, (False, True, False), config=config)
    for results in trainers:
        assert [result.ok for result in results] == [True, False, True]
    # Of version 1 attempt 0 was withdrawn and attempt 1 accepted. Version 2 lost attempts 0 and 1 to the skipped step.
    assert engine["committed"] == [(1, 1), (2, 3)]
    assert engine["accepted"] == [(0, 0, 0), (1, 1, 1), (2, 3, 3)], "the skipped step counts as a train step"
    assert engine["live"] == [1, 2]
    for commit, version in enumerate((1, 2), start=1):
        assert _differing(tmp_path, commit, version, config) == []
    if config is not CONFIG:
        return
    wasted = [(version, attempt) for version, attempt, _, num_bytes in engine["emitted"] if num_bytes]
    for attempt in ((1, 0), (2, 0)):
        assert wasted.count(attempt) == config.pp, "withdrawn attempts are reported as what they cost"


@pytest.mark.full
def test_a_provisional_version_that_is_shown_is_noticed(tmp_path: Path) -> None:
    """The same with a coordinator that does not wait for the trainer's word: what was live is not the trainer's."""
    _, engine = _run(tmp_path, (False, False), broken=True)
    assert engine["committed"] == [(1, 0), (2, 0)]
    assert len(_differing(tmp_path, 1, 1)) > 10
