"""Stock vLLM takes what `convert --dtype fp8-block128` writes, and computes with the weights that it stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.convert_models import converted, tensors_of
from tests.helpers.fp8_reference import LINEAR, slow_plain
from tests.helpers.tiny_moe import TinyMoe, random_weights, write_checkpoint
from tests.helpers.vllm_scores import scores

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

MOE = TinyMoe(hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=128)
"""vLLM wants every part of a fused linear, and the width of experts, to be whole blocks."""


def write_plain(folder: Path, quantized: Path) -> Path:
    """The weights that a folder in fp8 stands for, in bf16, put together with torch."""
    tensors = tensors_of(quantized)
    plain = {
        name: slow_plain(tensor, tensors[f"{name}_scale_inv"]).bfloat16() if LINEAR.search(name) else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }
    return write_checkpoint(folder, MOE, plain)


def mean_difference(one: list[float], other: list[float]) -> float:
    return (torch.tensor(one) - torch.tensor(other)).abs().mean().item()


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's fp8 on a CPU needs AMX")
def test_vllm_computes_with_what_it_stands_for(tmp_path: Path) -> None:
    """Nearer to it than to the weights that were rounded, and far from itself once a layer's scales are doubled."""
    source = write_checkpoint(tmp_path / "hf", MOE, random_weights(MOE, 1))
    quantized = converted(source, tmp_path / "fp8", dtype="fp8-block128", max_file_bytes=500_000)
    found = scores(quantized)
    apart = mean_difference(found, scores(write_plain(tmp_path / "plain", quantized)))
    assert apart < 0.5 * mean_difference(found, scores(source))
    tensors = tensors_of(quantized)
    (tmp_path / "broken").mkdir()
    for name, tensor in tensors.items():
        if "layers.1.mlp.experts" in name and name.endswith("_scale_inv"):
            tensor.mul_(2)
    save_file(tensors, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "broken" / name).write_bytes((quantized / name).read_bytes())
    assert json.loads((quantized / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    assert mean_difference(found, scores(tmp_path / "broken")) > 5 * apart


def test_vllm_dequantizes_to_the_same(tmp_path: Path) -> None:
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, scaled_dequantize

    source = write_checkpoint(tmp_path / "hf", MOE, random_weights(MOE, 1))
    tensors = tensors_of(converted(source, tmp_path / "fp8", dtype="fp8-block128"))
    linears = [name for name in tensors if LINEAR.search(name)]
    for name in linears:
        codes, scales = tensors[name], tensors[f"{name}_scale_inv"]
        theirs = scaled_dequantize(codes, scales, GroupShape(128, 128))
        assert theirs.equal(slow_plain(codes, scales)), name
        assert (theirs - tensors_of(source)[name].float()).abs().max() <= 16.5 * scales.max()
    assert len(linears) == MOE.layers * (4 + 3 * MOE.experts)
