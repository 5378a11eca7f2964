"""What a checkpoint of `megastream train` says of its training, and what the next one makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastream.rl import facts
from megastream.rl.train_config import parse_train_config
from megastream.trainer.agreement import AgreedError
from megastream.trainer.checkpoint_types import Resumed
from tests.helpers.train_job import job


def test_whatever_changes_the_order_of_sums_is_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a start calls it the same one, the training is promised to go on bit for bit."""
    monkeypatch.setattr(facts, "mesh_coords", lambda: {"dp": 0, "dp_size": 2})

    def layout(**changes: Any) -> dict[str, Any]:
        return facts.layout_of(parse_train_config(job(tmp_path, **changes)))

    assert layout() == layout(max_abort_rate=0.5, run__steps=99, deadlines__step_s=7) and layout()["dp_size"] == 2
    for changed in (
        {"batch__micro_sequences": 1},
        {"bucket_elements": 7000},
        {"finality": "speculative"},
        {"layout__overlap_grad_reduce": True},
        {"layout__dispatcher": "alltoall"},
        {"layout__recompute": "full"},
        {"layout__stage_layers": [3, 1]},
        {"layout__vpp": 2},
    ):
        assert layout(**changed) != layout(), changed


@pytest.mark.parametrize(("state", "word"), [({}, "sequences"), ({"sequences": 8, "skipped": "0"}, "skipped")])
def test_a_checkpoint_that_does_not_say_where_to_go_on_is_named(state: dict[str, Any], word: str) -> None:
    resumed = Resumed(3, Path("run/step_00000003"), state, (), False, False)
    with pytest.raises(AgreedError, match=rf"step_00000003: state\.{word} of its manifest\.json is .*weights_only"):
        facts.Position.of(resumed)
