"""What a rank's live model is made of: which expert lies in which slot, and tensors that are computed from weights and
are no parameters. No commit would write these, so they are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.engine import set_environment

set_environment()

from megastream.engine.contract import LiveModelError  # noqa: E402
from megastream.engine.vllm import compat, refusals  # noqa: E402
from tests.helpers.engine import Engine  # noqa: E402


def test_the_expert_in_each_slot_is_read_from_the_live_map() -> None:
    """In whatever order experts lie, also where each rank has every other one."""
    experts: Any = torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(torch.ones(3, 4, 2), requires_grad=False)
    for live_map, expected in (
        (None, (0, 1, 2)),
        ([-1, 2, -1, 0, 1, -1], (3, 4, 1)),
        ([0, -1, 1, -1, 2, -1], (0, 2, 4)),
    ):
        experts.expert_map = live_map if live_map is None else torch.tensor(live_map, dtype=torch.int32)
        assert compat.expert_slots(experts) == expected


def model() -> Any:
    """Modules as vLLM builds them, with what they hold beside parameters and no weight goes into."""
    attention: Any = torch.nn.Module()
    for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
        attention.register_buffer(name, torch.ones(()))
    attention._k_scale_cpu, attention.kv_cache = torch.ones(()), [torch.zeros(2, 8)]
    sinks = torch.nn.Parameter(torch.randn(4), requires_grad=False)
    attention.impl = SimpleNamespace(sinks=sinks, alibi_slopes=None, heads=[4], scale=0.5)
    experts: Any = torch.nn.Module()
    experts.register_buffer("_expert_map", torch.arange(8), persistent=False)
    experts.register_buffer("expert_mask", None)
    head: Any = torch.nn.Linear(8, 32, bias=False)
    head.quant_method, head.tied = SimpleNamespace(), head.weight.data[:16]
    rotary: Any = torch.nn.Module()
    rotary.register_buffer("cos_sin_cache", torch.randn(16, 8), persistent=False)
    whole: Any = torch.nn.ModuleDict({"attn": attention, "experts": experts, "lm_head": head, "rotary": rotary})
    whole.sinks, whole.empty = sinks, torch.tensor([])
    return whole


def buffer(whole: Any) -> None:
    whole.experts.register_buffer("w13_scaled", whole.lm_head.weight * 2)


def wide_head(whole: Any) -> None:
    whole.lm_head.weight_wide = whole.lm_head.weight.data.float().double()


PLANTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "buffer": (buffer, r"experts.w13_scaled \(\(32, 8\), float32\) on engine rank 3 .* may be computed from weights"),
    "head in another type": (wide_head, r"lm_head.weight_wide \(.* float64\).* may be a copy of lm_head.weight"),
    "attribute": (lambda m: setattr(m.attn, "W_UK_T", torch.ones(3, 2)), r"attn.W_UK_T \(\(3, 2\)"),
    "list": (lambda m: setattr(m.attn, "halves", [None, torch.ones(3)]), r"attn.halves\[1\]"),
    "dict": (lambda m: setattr(m.attn, "parts", {"q": torch.ones(3)}), r"attn.parts\['q'\]"),
    "sinks of a kernel": (lambda m: setattr(m.attn.impl, "sinks", m.sinks.double()), r"attn.impl.sinks"),
    "method": (lambda m: setattr(m.lm_head.quant_method, "packed", torch.ones(2)), "lm_head.quant_method.packed"),
    "made later": (lambda m: setattr(m.experts, "_fse_fuse_gate", True), "experts._combined_gate_weight .*first step"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_computed_from_weights_is_refused_by_name(kind: str) -> None:
    plant, named = PLANTED[kind]
    whole = model()
    refusals.refuse_derived(whole, 3)
    plant(whole)
    with pytest.raises(LiveModelError, match=named) as caught:
        refusals.refuse_derived(whole, 3)
    assert "\n" not in str(caught.value) and "when a version is committed" in str(caught.value)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_a_real_engine_is_not_described_with_one(engine: Engine, kind: str) -> None:
    """Planted in its live model, beside every head or norm; without it the engine is described."""
    before, planted, after = (engine.run(engine.ranks("feed_described_with", each)) for each in ("", kind, ""))
    assert before == after == [""] * len(before)
    assert all("planted" in error and "is no parameter" in error for error in planted), planted
