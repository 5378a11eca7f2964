"""The vLLM room without an engine: real kernels, refusals, spans, the board, the plugin's settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.engine import set_environment

set_environment()

from megastream import vllm_entry  # noqa: E402
from megastream.engine.contract import LiveModelError  # noqa: E402
from megastream.engine.digest import tensor_digest  # noqa: E402
from megastream.engine.settings import EngineSettings  # noqa: E402
from megastream.engine.supported import SUPPORTED_BELOW, SUPPORTED_MIN  # noqa: E402
from megastream.engine.vllm import buffers, compat, cpu_repairs, refusals  # noqa: E402
from megastream.engine.vllm.board import Board, BoardSlot  # noqa: E402
from megastream.engine.vllm.hooks import Guard  # noqa: E402
from megastream.engine.vllm.kv import KvBook  # noqa: E402
from megastream.engine.vllm.spans import SpanBook  # noqa: E402
from megastream.protocol.control import ControlError  # noqa: E402


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def packed_linear(weight: torch.Tensor) -> buffers.PackedLinear:
    """A linear as vLLM leaves it on CPU: an empty parameter and a kernel."""
    module = torch.nn.Module()
    compat.set_packed_linear(module, compat.pack_linear(weight))
    empty = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
    return buffers.PackedLinear("layer.weight", module, empty, tuple(weight.shape))


@pytest.mark.parametrize("shape", [(8, 64), (128, 64), (96, 1056), (512, 33), (1024, 1024)])
def test_identity_probe_is_exact_and_kernels_are_swapped(shape: tuple[int, int]) -> None:
    """Shapes for vLLM's small-weight kernel and for oneDNN, more columns than one probe takes among them."""
    first, second = random(*shape), random(*shape) * 3
    buffer = packed_linear(first)
    assert torch.equal(buffer.read(), first)
    staged = second.clone()
    prepared = buffer.prepare(staged)
    staged.fill_(float("nan"))  # staging is written again: nothing live may alias it
    assert torch.equal(buffer.read(), first)
    buffers.apply(prepared)
    buffers.apply(prepared)
    assert torch.equal(buffer.read(), second)


def test_digest_ignores_only_what_no_kernel_shows() -> None:
    weight = random(128, 64)
    weight[0, 0], weight[1, 1] = -0.0, 1e-39
    assert tensor_digest(packed_linear(weight).read()) == tensor_digest(weight)
    flipped = weight.clone()
    flipped.view(torch.int16)[5, 5] ^= 1
    assert tensor_digest(packed_linear(flipped).read()) != tensor_digest(weight)


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_experts_are_unpacked_and_packed(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cpu_moe_isa", lambda module: isa)
    first, second = random(3, 64, 96), random(3, 64, 96) * 3
    live = torch.nn.Parameter(compat.prepack_experts(first, isa), requires_grad=False)
    address = live.data_ptr()
    buffer = buffers.PackedExperts("experts.w13_weight", torch.nn.Module(), live, (3, 64, 96))
    assert torch.equal(buffer.read(), first)
    buffers.apply(buffer.prepare(second))
    assert torch.equal(buffer.read(), second) and live.data_ptr() == address
    live.data.view(-1)[7:8].view(torch.int16).bitwise_xor_(1)
    assert (buffer.read() != second).sum() == 1


def vllm_config(**changes: Any) -> SimpleNamespace:
    model: dict[str, Any] = dict.fromkeys(("quantization", "enable_sleep_mode", "is_hybrid"))
    model["hf_config"] = SimpleNamespace(tie_word_embeddings=False)
    parallel = {"enable_eplb": False, "data_parallel_size": 1, "pipeline_parallel_size": 1}
    top = {"lora_config": None, "speculative_config": None}
    for key, value in changes.items():
        next(group for group in (model, parallel, top) if key in group)[key] = value
    return SimpleNamespace(model_config=SimpleNamespace(**model), parallel_config=SimpleNamespace(**parallel), **top)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization": "fp8"}, "fp8"),
        ({"lora_config": object()}, "LoRA"),
        ({"enable_eplb": True}, "EPLB"),
        ({"speculative_config": object()}, "draft"),
        ({"data_parallel_size": 2}, "--data-parallel-size 1"),
        ({"hf_config": SimpleNamespace(tie_word_embeddings=True), "pipeline_parallel_size": 2}, "tied"),
        ({"enable_sleep_mode": True}, "sleep"),
        ({"is_hybrid": True}, "recurrent states"),
    ],
)
def test_configurations_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    refusals.refuse_config(vllm_config())
    with pytest.raises(LiveModelError, match=named):
        refusals.refuse_config(vllm_config(**changes))


def test_private_expert_layouts_are_refused_by_name() -> None:
    experts: Any = torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(random(2, 64, 32), requires_grad=False)
    experts.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name="FLASHINFER_TRTLLM"))
    with pytest.raises(LiveModelError, match="FLASHINFER_TRTLLM.*--moe-backend triton"):
        refusals.refuse_modules(torch.nn.ModuleDict({"experts": experts}))
    padded = torch.nn.Parameter(random(2, 128, 32), requires_grad=False)
    with pytest.raises(LiveModelError, match=r"experts.w13_weight on engine rank 1 .*\(2, 128, 32\).*\(2, 64, 32\)"):
        refusals.refuse_buffer(buffers.Plain("experts.w13_weight", experts, padded, (2, 64, 32)), 1)


@pytest.mark.parametrize(
    ("found", "accepted"), [("0.25.1", False), ("0.26.0", True), ("0.32.1+cpu", True), ("0.33.0rc1", False)]
)
def test_versions_are_checked_by_name(found: str, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.vllm, "__version__", found)
    if accepted:
        compat.check_version()
        return
    with pytest.raises(compat.UnsupportedVersion, match=rf"{found}.*0\.26\.0 <= version < 0\.33"):
        compat.check_version()


def test_cpu_repairs_are_refused_on_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_repairs.check()
    monkeypatch.setattr(compat.vllm, "__version__", "0.31.2")
    with pytest.raises(compat.UnsupportedVersion, match="0.31.2 on CPU.*written for 0.32"):
        cpu_repairs.check()


def test_the_supported_range_is_the_pinned_one() -> None:
    from tests.helpers.engine import ROOT

    pins = dict(line.split("=", 1) for line in (ROOT / "versions.env").read_text().splitlines() if "=" in line[:40])
    assert pins["VLLM_MIN"] == ".".join(map(str, SUPPORTED_MIN))
    assert pins["VLLM_BELOW"] == ".".join(map(str, SUPPORTED_BELOW))


def test_settings_name_the_nearest_key() -> None:
    def read(**given: Any) -> vllm_entry.PluginSettings:
        return vllm_entry.read_settings(SimpleNamespace(additional_config={"megastream": given}))

    assert not vllm_entry.read_settings(SimpleNamespace(additional_config={})).attachable
    with pytest.raises(ValueError, match="megastream.recods .*nearest known key is records"):
        read(recods=True)
    with pytest.raises(ValueError, match="no megastream.engine"):
        read(control_url="unix:///x", run_id="r")


def test_cores_of_one_vllm_have_names_of_their_own() -> None:
    """A dense model's data-parallel cores are independent: under one name, each would take the other's records."""

    def name(**parallel: Any) -> str:
        given = {"control_url": "redis://h", "run_id": "r", "engine": "e"}
        config = SimpleNamespace(
            additional_config={"megastream": given}, parallel_config=SimpleNamespace(data_parallel_size=1, **parallel)
        )
        return vllm_entry.read_settings(config).engine

    assert [name(), name(data_parallel_index=0), name(data_parallel_index=2)] == ["e", "e", "e-dp2"]


def test_engine_settings_can_be_given() -> None:
    def read(settings: Any, **defaults: Any) -> EngineSettings:
        config = SimpleNamespace(additional_config={"megastream": {"settings": settings}})
        return vllm_entry.read_settings(config, **defaults).settings

    assert read({}) == EngineSettings()
    assert read({"commit_s": 7, "staging_sets": 1}) == EngineSettings(commit_s=7, staging_sets=1)
    assert read({}, device="cuda:0").pin_memory and not read({"pin_memory": False}, device="cuda:0").pin_memory
    assert read({}, device="cuda:0").staging_device == "cpu", "gloo lanes end in host memory"
    for wrong, named in (
        ({"comit_s": 7}, "megastream.settings.comit_s .*nearest known key is commit_s"),
        ({"commit_s": 0}, "commit_s must be above 0"),
        ({"commit_s": float("inf")}, "commit_s must be above 0 and finite"),
        ({"commit_s": "7"}, "commit_s must be a number"),
        ({"staging_sets": 1.5}, "staging_sets must be a number"),
        ({"pin_memory": 1}, "pin_memory must be true or false"),
        ({"staging_device": "gpu"}, "staging_device is 'gpu'; give cpu, or a GPU"),
        ([], "must be an object"),
    ):
        with pytest.raises(ValueError, match=named):
            read(wrong)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, "megastream in --additional-config must be an object .* not NoneType"),
        ([1], "must be an object .* not list"),
        ("x", "must be an object .* not str"),
        ({1: 2}, "must be an object"),
        ({"control_url": 5}, "`str`, got `int` - at `megastream.control_url`"),
        ({"control_url": None}, "`megastream.control_url`"),
        ({"control_url": "redis://h", "engine": "e", "run_id": 5}, "`megastream.run_id`"),
        ({"control_url": "redis://h", "run_id": "r", "engine": [1]}, "`megastream.engine`"),
        ({"control_url": "redis://h", "run_id": "r", "engine": "é \n"}, "megastream.engine .* letters"),
        ({"run_id": "r"}, "megastream.run_id but no megastream.control_url"),
        ({"engine": "e"}, "megastream.engine but no megastream.control_url"),
        ({"host": {"a": 1}}, "`megastream.host`"),
        ({"host": ""}, "megastream.host"),
        ({"reconnect_s": "30"}, "`megastream.reconnect_s`"),
        ({"reconnect_s": -1}, "megastream.reconnect_s .* above 0"),
        ({"reconnect_s": float("nan")}, "megastream.reconnect_s .* is nan"),
        ({"reconnect_s": 1e300}, "megastream.reconnect_s .* at most 604800"),
        ({"records": 1}, "`megastream.records`"),
        ({"kv": [1]}, "megastream.kv is"),
    ],
)
def test_plugin_settings_are_typed(given: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        vllm_entry.read_settings(SimpleNamespace(additional_config={"megastream": given}))
    assert "\n" not in str(caught.value)


def test_additional_config_of_other_kinds() -> None:
    for wrong in ("zzz", [1]):
        with pytest.raises(ValueError, match="--additional-config must be an object"):
            vllm_entry.read_settings(SimpleNamespace(additional_config=wrong))
    assert not vllm_entry.read_settings(SimpleNamespace(additional_config=object())).attachable


def test_a_control_url_that_hides_a_password_is_refused_and_not_repeated() -> None:
    given = {"control_url": "redis://:hush#hush@h", "run_id": "r", "engine": "e"}
    with pytest.raises(ControlError, match="percent-encode") as caught:
        vllm_entry.read_settings(SimpleNamespace(additional_config={"megastream": given}))
    assert "hush" not in str(caught.value)


def test_spans_join_steps_and_leave_with_the_last_output() -> None:
    def output(request_id: str, count: int, finish_reason: str | None = None) -> dict[int, Any]:
        one = SimpleNamespace(
            request_id=request_id, new_token_ids=[1] * count, finish_reason=finish_reason, kv_transfer_params={"k": 1}
        )
        return {0: SimpleNamespace(outputs=[one])}

    def shown(request_id: str) -> bool:
        return request_id == "stops"

    book = SpanBook(KvBook("salt"))
    assert book.add("3", output("a", 2), shown) == {"a": 2}
    assert book.add("3", output("a", 1), shown) == {"a": 1}
    assert book.add("4", output("a", 0), shown) == {}
    last = output("a", 1, "stop")
    book.add("5", last, shown)
    spans = [{"version": "3", "start": 0, "end": 3}, {"version": "5", "start": 3, "end": 4}]
    assert last[0].outputs[0].kv_transfer_params == {"k": 1, "weight_versions": spans, "kv_versions": []}
    book.add("5", output("b", 1), shown)
    assert book.carried("b")["weight_versions"] == [{"version": "5", "start": 0, "end": 1}]
    book.forget(["b"])
    assert book.add("6", output("b", 1, "stop"), shown) == {"b": 1}
    early, later = output("stops", 1), output("stops", 1)
    book.add("6", early, shown)
    book.add("6", later, shown)  # an output that is still being encoded does not change
    ends = [one[0].outputs[0].kv_transfer_params["weight_versions"][0]["end"] for one in (early, later)]
    assert ends == [1, 2]


def test_board_carries_reports_and_leaves_nothing() -> None:
    board = Board(2)
    slot = BoardSlot(str(board.path), 1)
    folder = board.path.parent
    board.unlink()
    assert not folder.exists()
    slot.report()
    slot.report()
    assert board.reports() == (0, 2)


def test_guard_keeps_errors_in() -> None:
    with Guard() as guard:
        raise KeyError("x")
    assert guard.error == "KeyError: 'x'"
    with pytest.raises(KeyboardInterrupt), Guard():
        raise KeyboardInterrupt


def test_a_kernel_that_keeps_a_view_gets_its_own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's zentorch kernel without prepacking multiplies with the tensor that it was made from."""
    from vllm.model_executor.layers import utils

    def keeping(layer: Any, remove_weight: bool) -> None:
        kept = layer.weight.detach()
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, kept)

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keeping)
    weight, x = random(8, 64), random(2, 64)
    kernel, expected = compat.pack_linear(weight), torch.nn.functional.linear(x, weight)
    weight.fill_(float("nan"))
    assert torch.equal(kernel(x, weight, None), expected)
