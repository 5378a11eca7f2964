"""A budget for staging: how it is given, what a rank's real buffers do with host memory, what it is in KV blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.engine import set_environment

set_environment()

from megastream import vllm_entry  # noqa: E402
from megastream.engine.contract import LiveModelError  # noqa: E402
from megastream.engine.settings import EngineSettings  # noqa: E402
from megastream.engine.vllm import buffers, compat  # noqa: E402
from megastream.engine.vllm.live import VllmLiveModel  # noqa: E402
from megastream.plan.tiers import StagingBudget  # noqa: E402
from tests.engine.test_room import packed_linear, random  # noqa: E402


@pytest.mark.parametrize("at_once", [False, True])
def test_a_rank_writes_what_waited_in_host_memory_as_it_writes_what_was_prepared(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed linear, packed experts and a plain tensor; then two of three experts alone."""
    monkeypatch.setattr(compat, "cpu_moe_isa", lambda module: "vec")
    old = {"linear": random(128, 64), "experts": random(3, 64, 96), "norm": random(64)}
    new = {name: tensor * 3 for name, tensor in old.items()}
    experts, norm = (
        torch.nn.Parameter(tensor, requires_grad=False)
        for tensor in (compat.prepack_experts(old["experts"], "vec"), old["norm"].clone())
    )
    live = VllmLiveModel.__new__(VllmLiveModel)
    live.rank = 0
    live.__dict__["buffers"] = {
        "linear": packed_linear(old["linear"]),
        "experts": buffers.PackedExperts("experts", torch.nn.Module(), experts, (3, 64, 96)),
        "norm": buffers.Plain("norm", torch.nn.Module(), norm, (64,)),
    }

    def write(tensors: dict[str, torch.Tensor], ranges: dict[str, Any]) -> None:
        staging = {name: tensor.clone().view(-1) for name, tensor in tensors.items()}
        if at_once:
            live.write_live(staging, ranges)
        else:
            live.commit(live.prepare(staging, ranges))
        for flat in staging.values():
            flat.fill_(float("nan"))

    write(new, {})
    assert all(torch.equal(live.read_live(name), new[name]) for name in new)
    size = 64 * 96
    write({"experts": old["experts"]}, {"experts": ((0, size), (2 * size, 3 * size))})
    assert torch.equal(
        live.read_live("experts"), torch.stack([old["experts"][0], new["experts"][1], old["experts"][2]])
    )
    with pytest.raises(LiveModelError, match="no whole rows"):
        write({"experts": old["experts"]}, {"experts": ((0, 7),)})
    with pytest.raises(LiveModelError, match="has no parameter other"):
        write({"other": old["norm"]}, {})


def test_bytes_of_a_kv_block_count_shared_memory_once() -> None:
    def config(layers: dict[str, Any], num_blocks: int | None) -> SimpleNamespace:
        return SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=num_blocks),
            compilation_config=SimpleNamespace(static_forward_context=layers),
        )

    own, shared = torch.zeros(10, 2, 8), torch.zeros(10, 4)
    layers = {"0": own, "1": [shared[:, :2]], "2": (shared[:, 2:],), "3": [], "4": None}
    caches = {name: SimpleNamespace(kv_cache=cache) for name, cache in layers.items()} | {"5": SimpleNamespace()}
    assert compat.kv_block_bytes(config(caches, 10)) == 4 * (2 * 8 + 4)
    assert compat.kv_block_bytes(config(caches, None)) == 0 == compat.kv_block_bytes(config({}, 10))


def read(settings: Any, device: str = "cpu") -> EngineSettings:
    config = SimpleNamespace(additional_config={"megastream": {"settings": settings}})
    return vllm_entry.read_settings(config, device=device).settings


def test_a_budget_counts_what_is_on_the_device_of_the_weights() -> None:
    budget = {"staging": {"device_bytes": 5}}
    assert read(budget) == EngineSettings(staging=StagingBudget(device_bytes=5))
    on_gpu = read(budget, "cuda:0")
    assert on_gpu.staging_device == "cuda:0" and on_gpu.pin_memory


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"staging": 5}, "staging must be an object, got 5"),
        ({"staging": {"device": 5}}, "unknown key megastream.settings.staging.device .*known key is device_bytes"),
        ({"staging": {"host_bytes": -1}}, "staging.host_bytes must be a whole number of bytes"),
        ({"staging": {}, "staging_device": "cpu"}, "staging_device='cpu' beside staging, .*; leave staging_device out"),
    ],
)
def test_a_budget_that_is_none_is_refused_by_name(wrong: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(wrong)
