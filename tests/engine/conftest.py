"""One engine per layout for a whole module: a start costs half a minute on two cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers import reveal
from tests.helpers.engine import Engine
from tests.helpers.tiny_moe import write_checkpoint

TWO_RANKS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_size": 2},
    "tp2ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


# On a machine with one GPU the two-rank layouts cannot start; the tests about rank 1 are left out there by name.
LAYOUTS = {"one": {}} if torch.cuda.device_count() == 1 else TWO_RANKS


@pytest.fixture(scope="module", params=LAYOUTS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A real engine that serves version 0 of the version-revealing weights, with stand-in agents on its ranks."""
    model = write_checkpoint(tmp_path_factory.mktemp("reveal"), reveal.MOE, reveal.weights(0))
    engine = Engine(model, additional_config={"megastream": {"records": True}}, **LAYOUTS[request.param])
    try:
        engine.run(engine.ranks("feed_install"))
        yield engine
    finally:
        engine.close()
