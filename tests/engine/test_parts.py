"""Parts of a version in the vLLM room without an engine: rows of live buffers, use of experts, the poisoned core."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.engine import set_environment

set_environment()

from megastream import vllm_entry  # noqa: E402
from megastream.engine.contract import CommitRequest, LiveModelError  # noqa: E402
from megastream.engine.vllm import buffers, compat, refusals  # noqa: E402
from megastream.engine.vllm.expert_use import ExpertUse  # noqa: E402
from megastream.engine.vllm.live import _rows  # noqa: E402
from megastream.engine.vllm.port import MOST_MIXES, PortSettings, VllmCorePort  # noqa: E402
from megastream.engine.vllm.worker import UNKNOWN_LABEL, RankState  # noqa: E402
from megastream.protocol.mix import Mix  # noqa: E402
from megastream.protocol.records import RankCommit  # noqa: E402


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed_experts(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> buffers.PackedExperts:
    monkeypatch.setattr(compat, "cpu_moe_isa", lambda module: "vec")
    live = torch.nn.Parameter(compat.prepack_experts(weight, "vec"), requires_grad=False)
    return buffers.PackedExperts("experts.w13_weight", torch.nn.Module(), live, tuple(weight.shape))


def test_some_experts_become_live_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = random(1, 4, 64, 32), random(2, 4, 64, 32)
    buffer = packed_experts(old, monkeypatch)
    address = buffer.parameter.data_ptr()
    buffers.apply(buffers.merge([buffer.prepare(new, slice(0, 1)), buffer.prepare(new, slice(2, 3))]))
    assert torch.equal(buffer.read(), torch.stack([new[0], old[1], new[2], old[3]]))
    assert buffer.parameter.data_ptr() == address
    assert _rows(buffer, 2048, 6144) == slice(1, 3)
    with pytest.raises(LiveModelError, match="elements 2048 to 6145 of experts.w13_weight are no whole rows of 2048"):
        _rows(buffer, 2048, 6145)


def test_a_linear_that_is_packed_as_a_whole_takes_no_rows() -> None:
    module = torch.nn.Module()
    buffer = buffers.PackedLinear("q.weight", module, torch.nn.Parameter(torch.empty(0)), (64, 64))
    with pytest.raises(LiveModelError, match="q.weight is packed as a whole"):
        buffer.prepare(random(1, 64, 64), slice(0, 8))


class Router:
    """What the counting needs of vLLM's."""

    def __init__(self, num_experts: int) -> None:
        self.global_num_experts = num_experts
        self.chosen: Any = None

    def set_capture_fn(self, chosen: Any) -> None:
        self.chosen = chosen


def model_of(*routers: Router | None) -> torch.nn.Module:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    for router in routers:
        layer, runner = torch.nn.Module(), torch.nn.Module()
        runner.routed_experts = torch.nn.Module()
        runner.routed_experts.quant_method = SimpleNamespace(is_monolithic=router is None)
        runner.router = router
        layer.experts = runner
        model.layers.append(layer)
    return model


def test_use_is_counted_in_place_and_halved_at_each_reading() -> None:
    first, second = Router(4), Router(4)
    use = ExpertUse(model_of(first, second), torch.device("cpu"))
    address = use._counts.data_ptr()
    first.chosen(torch.tensor([[0, 3], [3, 1]], dtype=torch.int32))
    second.chosen(torch.tensor([[2, 2]]))
    assert use.read() == {0: [1.0, 1.0, 0.0, 2.0], 1: [0.0, 0.0, 2.0, 0.0]}
    first.chosen(torch.tensor([[3, 2]]))
    assert use.read() == {0: [0.5, 0.5, 1.0, 2.0], 1: [0.0, 0.0, 1.0, 0.0]}
    assert use._counts.data_ptr() == address
    with pytest.raises(LiveModelError, match="layers.1.experts chooses experts inside its kernel"):
        ExpertUse(model_of(Router(4), None), torch.device("cpu"))
    config = SimpleNamespace(model_config=SimpleNamespace(enable_return_routed_experts=True))
    with pytest.raises(LiveModelError, match="leave out --enable-return-routed-experts"):
        refusals.refuse_counting(config)


def request(number: int, mix: Mix | None = None) -> CommitRequest:
    units = ("a",) if mix is not None else ("b",)
    return CommitRequest("i1", 1, number, 0, units, mix)


class Core:
    """A core without work, whose two ranks answer a commit at once. `sent` are the requests that reached them."""

    def __init__(self) -> None:
        self.sent: list[CommitRequest] = []
        self.scheduler = SimpleNamespace(block_size=16, requests={}, finish_requests=lambda ids, status: None)
        self.model_executor = SimpleNamespace(collective_rpc=self.call)

    def has_work(self) -> bool:
        return False

    def call(self, method: str, args: Any) -> list[RankCommit]:
        self.sent.append(CommitRequest.read(args[1]))
        return [RankCommit(rank=rank, ok=True, stall_s=0.0, step=1) for rank in range(2)]


def test_a_poisoned_core_takes_no_part_and_has_the_next_version_written_in_every_unit() -> None:
    core: Any = Core()
    port = VllmCorePort(core, 2, PortSettings(kv="keep"))
    replies: list[tuple[RankCommit, ...]] = []
    try:
        mix = Mix(0, 1, ("a",), ("b",))
        port._commit(request(1, mix), replies.append)
        assert port.label == mix.label and port.live_version() == 0 and core.sent[0].mix == mix
        assert port.versions(mix.label) == {"oldest": 0, "newest": 1, "units": {"a": 1, "b": 0}}
        port._commit(request(1), replies.append)
        assert port.label == "1" and core.sent[1].units == ("b",), "the rest only"
        port.become_poisoned("a rank held another version")
        port._commit(request(2, Mix(1, 2, ("a",), ("b",))), replies.append)
        assert len(core.sent) == 2 and not replies[-1][0].ok and "takes a whole version only" in replies[-1][0].error
        port._commit(request(2), replies.append)
        assert core.sent[2].units is None and all(r.ok for r in replies[-1]) and not port.poisoned
        with pytest.raises(ValueError, match="not among the last"):
            port.versions("1..2+1")
        for number in range(MOST_MIXES):
            port._remember(Mix(number + 5, number + 6, ("a",), ("b",)))
        with pytest.raises(ValueError, match="not among the last"):
            port.versions(mix.label)
    finally:
        port.close()


def test_a_poisoning_under_way_is_not_healed_by_the_rest_of_a_version() -> None:
    core: Any = Core()
    port = VllmCorePort(core, 2, PortSettings(kv="keep"))
    replies: list[tuple[RankCommit, ...]] = []
    said: list[bool] = []
    try:
        port.watch_poison = said.append
        port.become_poisoned("a rank held another version")
        port._committed(request(1), replies.append, [RankCommit(rank=0, ok=True, stall_s=0.0, step=1)], "")
        assert port.poisoned and not replies[0][0].ok and said == [True]
        for _ in range(2):
            port._commit(request(2), replies.append)
        assert not port.poisoned and said == [True, False]
    finally:
        port.close()


def test_an_overlay_heals_no_poisoned_core() -> None:
    core: Any = Core()
    port = VllmCorePort(core, 2, PortSettings(kv="keep"))
    replies: list[tuple[RankCommit, ...]] = []
    over = CommitRequest("i1", 1, 5, 0, over=4)
    try:
        port._commit(over, replies.append)
        assert port.label == "5" and all(reply.ok for reply in replies[-1])
        port.become_poisoned("a rank held another version")
        port._commit(over, replies.append)
        assert len(core.sent) == 1 and "takes a whole version only" in replies[-1][0].error
        port._committed(over, replies.append, [RankCommit(rank=0, ok=True, stall_s=0.0, step=1)], "")
        assert port.poisoned and not replies[-1][0].ok
    finally:
        port.close()


MIX = {"oldest": 0, "newest": 1, "ahead": ("a",), "behind": ("b",)}


@pytest.mark.parametrize("part", [{"mix": MIX}, {"over": 0}])
def test_a_rank_whose_weights_are_unknown_takes_no_part(part: dict[str, Any]) -> None:
    state = RankState(0, torch.device("cpu"))
    state.agent = SimpleNamespace(commit=lambda request: pytest.fail("it was asked"))  # type: ignore[assignment]
    state.label = UNKNOWN_LABEL
    reply = state.commit({"attachment": "i1", "incarnation": 1, "version": 1, "attempt": 0, **part})
    assert not reply.ok and "take a whole version" in reply.error and state.label == UNKNOWN_LABEL


BAD_GATES = [({"gate": "pause"}, "with kind whole"), ({"gate": 5}, "choose one of"), ({"expert_use": 1}, "expert_use")]


@pytest.mark.parametrize(("given", "words"), BAD_GATES)
def test_bad_gates_are_refused_at_the_start(given: dict[str, Any], words: str) -> None:
    def read(given: dict[str, Any]) -> vllm_entry.PluginSettings:
        return vllm_entry.read_settings(SimpleNamespace(additional_config={"megastream": given}))

    with pytest.raises(ValueError, match=words):
        read(given)
    assert read({"gate": "stage"}).gate == "stage"
