"""What leaves before the norm is known is not shown: a whole provisional version lies sealed in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megastream.rl import oracle
from tests.distributed.test_adapter import random
from tests.helpers.provisional import body, engine_side
from tests.helpers.ranks import run_ranks
from tests.helpers.synthetic import region
from tests.helpers.tiny import oracle_model, tiny_config

CONFIG = tiny_config(pp=2, layers=2, clip=0.3, lr=0.05)


def _run(tmp_path: Path, poisoned: tuple[bool, ...], broken: bool = False) -> tuple[list[Any], dict[str, Any]]:
    save_file(random(CONFIG), tmp_path / "model.safetensors", metadata={"format": "pt"})
    *trainers, engine = run_ranks(
        body, CONFIG.pp + 1, config=CONFIG, folder=str(tmp_path), poisoned=poisoned, broken=broken, timeout_s=90
    )
    return trainers, engine


def _differing(tmp_path: Path, commit: int, version: int) -> list[str]:
    """Tensors that were live after this commit and are not what the trainer held after the step of `version`."""
    dumps = [oracle.read_dump(tmp_path / f"raw-{version}/rank{rank}.safetensors") for rank in range(CONFIG.pp)]
    expected = oracle.to_hf(oracle.gather(dumps), oracle_model(CONFIG))
    wrong = []
    for layout in engine_side(CONFIG):
        live = torch.load(tmp_path / f"live-{commit}-{layout.rank}.pt")
        for shard in layout.shards:
            slices = tuple(slice(lo, hi) for lo, hi in zip(shard.box.lo, shard.box.hi, strict=True))
            if not torch.equal(region(live[shard.buffer], shard), expected[shard.tensor][slices]):
                wrong.append(shard.tensor)
    return wrong


def test_no_provisional_version_is_shown(tmp_path: Path) -> None:
    """Every step is clipped, and one has a gradient that is not finite: its number is used by the next step."""
    trainers, engine = _run(tmp_path, (False, True, False))
    for results in trainers:
        assert [result.ok for result in results] == [True, False, True]
    # Of version 1 attempt 0 was withdrawn and attempt 1 accepted. Version 2 lost attempts 0 and 1 to the skipped step.
    assert engine["committed"] == [(1, 1), (2, 3)]
    assert engine["accepted"] == [(0, 0, 0), (1, 1, 1), (2, 3, 3)], "the skipped step counts as a train step"
    assert engine["live"] == [1, 2]
    for commit, version in enumerate((1, 2), start=1):
        assert _differing(tmp_path, commit, version) == []
    wasted = [(version, attempt) for version, attempt, _, num_bytes in engine["emitted"] if num_bytes]
    for attempt in ((1, 0), (2, 0)):
        assert wasted.count(attempt) == CONFIG.pp, "withdrawn attempts are reported as what they cost"


@pytest.mark.full
def test_a_provisional_version_that_is_shown_is_noticed(tmp_path: Path) -> None:
    """The same with a coordinator that does not wait for the trainer's word: what was live is not the trainer's."""
    _, engine = _run(tmp_path, (False, False), broken=True)
    assert engine["committed"] == [(1, 0), (2, 0)]
    assert len(_differing(tmp_path, 1, 1)) > 10
