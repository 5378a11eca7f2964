"""One engine per layout for all tests: a start costs half a minute on two cores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers import reveal
from tests.helpers.engine import Engine
from tests.helpers.feed import RANDOM
from tests.helpers.served import Cold, serve
from tests.helpers.tiny_moe import write_checkpoint

TWO_RANKS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_size": 2},
    "tp2ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


# On a machine with one GPU the two-rank layouts cannot start; the tests about rank 1 are left out there by name.
NUM_GPUS = torch.cuda.device_count()
LAYOUTS = {"one": {}} if NUM_GPUS == 1 else TWO_RANKS

TIGHT = {"num_gpu_blocks_override": 104 if NUM_GPUS else 13, "max_num_batched_tokens": 96}
"""A cache that eight long requests do not fit into, and steps that take a long prompt in chunks."""
FOUR_RANKS = {} if NUM_GPUS in (1, 2, 3) else {"tp2pp2": {**TWO_RANKS["pp2"], **TWO_RANKS["tp2ep"]}}
GATED = {**LAYOUTS, **{f"{name}-tight": {**layout, **TIGHT} for name, layout in {**LAYOUTS, **FOUR_RANKS}.items()}}
"""Engines for the tests of gates: a few tokens and all detectors on those that all tests share, many on tight ones."""
UNSTAGED = {f"{name}-unstaged": layout for name, layout in LAYOUTS.items()}
"""Likewise, but all weights are pulled inside the commit: for gate `version` alone."""
GATED |= UNSTAGED


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gates and swaps are run in one layout by default: a trainer has to attach first."""
    dropped = []
    for item in [item for item in items if item.path.name in ("test_gates.py", "test_swap_expert.py")]:
        if "tp2ep" in item.name or "tight" in item.name or "unstaged" in item.name:
            item.add_marker(pytest.mark.full)
        has_room = _needs_room_to_be_tight(item.name) == _is_tight(item.name)
        if not has_room or ("unstaged" in item.name and "back_at_gate_version" not in item.name):
            dropped.append(item)
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


def _needs_room_to_be_tight(test: str) -> bool:
    return "hard_traffic" in test or "had_to_wait_for_room" in test


def _is_tight(test: str) -> bool:
    """Engines of four ranks, which start in these tests alone, run what the others run, too: two cores are slow."""
    return "tight" in test and "tp2pp2" not in test


@pytest.fixture(scope="session")
def control_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from megastream.control.embedded import EmbeddedServer

    with EmbeddedServer(tmp_path_factory.mktemp("control")) as server:
        yield server.url


@pytest.fixture(scope="session", params=LAYOUTS)
def attachable(
    request: pytest.FixtureRequest, control_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A real engine that serves version 0 of the version-revealing weights; a trainer can attach over `control_url`."""
    model = write_checkpoint(tmp_path_factory.mktemp("reveal"), reveal.MOE, reveal.weights(0))
    settings = {"control_url": control_url, "run_id": request.param, "engine": request.param, "records": True}
    settings["expert_use"] = True
    settings["settings"] = {"compare_slice_s": 1e-6}  # a buffer at a time: at attach one rank is done before the other
    if request.param in UNSTAGED:
        settings["settings"]["staging"] = {"device_bytes": 0, "host_bytes": 0}
    engine = Engine(model, additional_config={"megastream": settings}, **GATED[request.param])
    engine.name = request.param
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="session")
def engine(attachable: Engine) -> Engine:
    """The same engine with stand-in agents on its ranks: tests feed versions to it without a trainer."""
    attachable.run(attachable.ranks("feed_install"))
    return attachable


@pytest.fixture(scope="session")
def cold(control_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cold]:
    """One `megastream serve` for all tests; its version 0 are random weights."""
    version, prompt = RANDOM + 1, (31, 7, 250, 99, 3, 120)
    with serve(tmp_path_factory.mktemp("served"), control_url, version) as server:
        request = {"prompt": list(prompt), "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        reply = server.post("/v1/completions", {**request, "return_token_ids": True})
        yield Cold(server, version, prompt, reply)
