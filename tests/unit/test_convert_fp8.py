"""`convert --dtype fp8-block128`: against blocks rounded one by one with torch, never against our own code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megastream.convert import execute, fp8
from megastream.convert.dtypes import FP8, as_float, to_fp8
from megastream.convert.forms import Options
from megastream.convert.run import convert
from megastream.convert.types import ConvertError
from megastream.families import FAMILIES
from tests.helpers.convert_models import converted, tensors_of, write_family, write_hf
from tests.helpers.fp8_reference import LINEAR, bits, slow_fp8, slow_plain

TO_FP8 = {"dtype": "fp8-block128"}
AWKWARD = {"hidden_size": 200, "intermediate_size": 150, "moe_intermediate_size": 130}
CHANGES = {"qwen2_moe": {"head_dim": 50, "shared_expert_intermediate_size": 140}}
"""A Qwen2-MoE's heads are its hidden size."""
FEW = ("deepseek_v3",)
STACKED = ("gpt_oss",)
PARAMS = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.full)
    for name in sorted(FAMILIES)
    if name not in STACKED
]
INDEX = "model.safetensors.index.json"


def write_awkward(folder: Path, family: str = "qwen2_moe") -> Path:
    return write_family(folder, family, **{**AWKWARD, **CHANGES.get(family, {})})


def test_fp8_rounds_as_torch_does() -> None:
    """All fp8, all bf16 in reach, what lies in the middle of two fp8 and right beside it, and random fp32."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    assert np.array_equal(as_float(codes.numpy(), FP8), values.numpy(), equal_nan=True)
    finite = values[~values.isnan()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    beside = [torch.nextafter(middles, middles + step) for step in (-1, 1)]
    narrow = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    spread = torch.randn(1 << 16) * torch.exp2(torch.randint(-14, 8, (1 << 16,)))
    floats = torch.cat([finite, middles, *beside, narrow, spread])
    floats = floats[floats.abs() < 464]
    assert len(floats) > 90_000
    assert np.array_equal(to_fp8(floats.numpy()), bits(floats.to(torch.float8_e4m3fn)).numpy())


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (300, 130), (129, 257), (7, 640)])
def test_blocks_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape))
    weight[: shape[0] // 2, : shape[1] // 2] = 0  # blocks of zeros where there are more than one
    weight[-1, -1] = 2.0**-149
    codes, scales = slow_fp8(weight)
    ours, factors = fp8.quantize(weight.clone().numpy())
    assert np.array_equal(ours, bits(codes).numpy()) and np.array_equal(factors, scales.numpy())
    assert factors.shape == fp8.scale_shape(shape)


@pytest.mark.parametrize("most", [1, 128 * 128, 5 * 128 * 128, 1 << 40])
def test_tiles_are_whole_blocks_and_cover_all(most: int) -> None:
    seen = np.zeros((500, 300), int)
    for tile in fp8.tiles((500, 300), most):
        assert tile.volume <= max(most, 128 * 128) and all(low % 128 == 0 for low in tile.lo)
        seen[tuple(map(slice, tile.lo, tile.hi))] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("family", PARAMS)
def test_linears_are_in_fp8_and_nothing_else_is(tmp_path: Path, family: str) -> None:
    source = write_awkward(tmp_path / "hf", family)
    target = converted(source, tmp_path / "fp8", **TO_FP8, max_file_bytes=100_000)
    before, after = tensors_of(source), tensors_of(target)
    linears = [name for name in before if LINEAR.search(name)]
    assert set(after) == {*before, *(f"{name}_scale_inv" for name in linears)}
    for name, tensor in before.items():
        if name in linears:
            codes, scales = slow_fp8(tensor)
            assert bits(after[name]).equal(bits(codes)) and after[name].dtype == torch.float8_e4m3fn, name
            assert after[f"{name}_scale_inv"].equal(scales), name
        else:
            assert after[name].equal(tensor) and after[name].dtype == tensor.dtype, name
    rest = {name.removesuffix(".weight") for name, tensor in before.items() if tensor.dim() == 2} - {
        name.removesuffix(".weight") for name in linears
    }
    said = json.loads((target / "config.json").read_text())["quantization_config"]
    assert set(said.pop("modules_to_not_convert")) == rest | {"lm_head"}
    block = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert said == block
    index = json.loads((target / INDEX).read_text())
    assert set(index["weight_map"]) == set(after) and len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())


@pytest.mark.full
def test_all_forms_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also block by block, from columns and rows that lie with several ranks, and from fp32 that holds the same."""
    source = write_awkward(tmp_path / "hf")
    wanted = (converted(source, tmp_path / "fp8", **TO_FP8) / "model.safetensors").read_bytes()
    monkeypatch.setattr(execute, "_TILE_SHARE", 1 << 40)
    again = converted(source, tmp_path / "again", **TO_FP8)
    assert (again / "model.safetensors").read_bytes() == wanted
    for form, layout in (("torch_dist", None), ("mp_rank", "tp2 etp2 pp3"), ("sharded_state", "tp2 ep2 pp2")):
        other = converted(source, tmp_path / form, form, to_layout=layout)
        target = converted(other, tmp_path / f"{form}-fp8", **TO_FP8)
        assert (target / "model.safetensors").read_bytes() == wanted, form
    wide = write_awkward(tmp_path / "wide")
    linears = {name: tensor.float() for name, tensor in tensors_of(source).items() if LINEAR.search(name)}
    save_file({**tensors_of(source), **linears}, wide / "model.safetensors")
    target = converted(wide, tmp_path / "wide-fp8", **TO_FP8)
    assert (target / "model.safetensors").read_bytes() == wanted


def test_config_json_says_what_the_files_hold(tmp_path: Path) -> None:
    """A tied head is no tensor, and still a linear that must be left alone; a published config may say fp8 of bf16."""
    source = write_hf(tmp_path / "hf", tied=True, layers=2, experts=4)
    said = json.loads((converted(source, tmp_path / "fp8", **TO_FP8) / "config.json").read_text())
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    assert said["quantization_config"]["modules_to_not_convert"] == ["lm_head", "model.embed_tokens", *routers]
    (source / "config.json").write_text(json.dumps(said))
    plain = json.loads((converted(source, tmp_path / "bf16") / "config.json").read_text())
    assert "quantization_config" not in plain and plain == {k: v for k, v in said.items() if k in plain}
    (source / "config.json").write_text(text := json.dumps(plain, indent=7))
    assert (converted(source, tmp_path / "same") / "config.json").read_text() == text


@pytest.mark.full
def test_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales and weights of a buffer that the journal counts are both on the disk."""
    source, target = write_awkward(tmp_path / "hf"), tmp_path / "fp8"
    wanted = (converted(source, tmp_path / "whole", **TO_FP8) / "model.safetensors").read_bytes()
    monkeypatch.setattr("megastream.convert.run._BATCH_BYTES", 100_000)
    real, synced = os.pwrite, [0]

    def cut(descriptor: int, data: bytes, offset: int) -> int:
        synced[0] += len(data)
        if synced[0] > 900_000:
            raise OSError(5, "Input/output error")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", cut)
    with pytest.raises(ConvertError, match="is kept for --resume"):
        converted(source, target, **TO_FP8)
    assert not target.exists()
    monkeypatch.setattr(os, "pwrite", real)
    with pytest.raises(ConvertError, match="of another source, target or option"):
        convert(source, target, Options(), lambda done, total: None, resume=True)
    told: list[tuple[int, int]] = []
    convert(source, target, Options(**TO_FP8), lambda *step: told.append(step), resume=True)
    assert 300_000 < told[0][0] < told[-1][0] == told[-1][1]
    assert (target / "model.safetensors").read_bytes() == wanted


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_transformers_loads_what_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Where there is no GPU transformers takes fp8 as the weights that it stands for: ours, put together with torch."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import quantizer_finegrained_fp8

    # It asks for a package that a model on one CPU does not need.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    source = write_hf(tmp_path / "hf", family, dtype=torch.float32, hidden=256, head_dim=32, expert_ffn=128, layers=2)
    quantized = converted(source, tmp_path / "fp8", **TO_FP8, max_file_bytes=300_000)
    tensors = tensors_of(source)
    for name, tensor in tensors_of(quantized).items():
        if LINEAR.search(name):
            tensors[name] = slow_plain(tensor, tensors_of(quantized)[f"{name}_scale_inv"])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, quantized)]
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert [name for name, tensor in states[0].items() if not tensor.equal(states[1][name])] == []
    with torch.no_grad():
        logits = [model(torch.arange(16).reshape(2, 8)).logits for model in models]
    assert logits[0].equal(logits[1]) and logits[0].std() > 0.1


@pytest.mark.parametrize(
    "value", [float("inf"), *(pytest.param(float(value), marks=pytest.mark.full) for value in ("-inf", "nan"))]
)
def test_what_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    source = write_awkward(tmp_path / "hf")
    tensors, name = tensors_of(source), "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name][131, 129] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConvertError, match=rf"{name}\[131, 129\] is {value}, .*; leave --dtype out") as caught:
        converted(source, tmp_path / "fp8", **TO_FP8)
    assert "\n" not in str(caught.value) and not (tmp_path / "fp8").exists()
    converted(source, tmp_path / "bf16")


@pytest.mark.parametrize("form", ["torch_dist", "mp_rank", "sharded_state"])
def test_forms_that_hold_no_fp8_refuse_it(tmp_path: Path, form: str) -> None:
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    layout = None if form == "torch_dist" else "tp2"
    with pytest.raises(ConvertError, match=f"--dtype fp8-block128 is for --to hf; {form} "):
        converted(source, tmp_path / "b", form, to_layout=layout, **TO_FP8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("family", STACKED)
def test_stacked_experts_are_refused(tmp_path: Path, family: str) -> None:
    source = write_family(tmp_path / "hf", family)
    with pytest.raises(ConvertError, match=f"{family} stacks them in model.layers.0.mlp.experts.gate_up_proj, "):
        converted(source, tmp_path / "b", **TO_FP8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_every_matrix_of_a_layer_is_a_linear_or_a_gate() -> None:
    """Of experts, or of a delta net, whose gates vLLM has in no block of fp8."""
    for name, family in FAMILIES.items():
        for row in family.rows:
            for source in row.sources if name not in STACKED and row.layers not in ("none", "mtp") else ():
                gate = source.name.endswith((".gate.weight", ".shared_expert_gate.weight", ".in_proj_ba.weight"))
                assert source.linear == (len(source.dims) == 2 and not gate), source
                assert source.linear == bool(LINEAR.search(source.name)), source
