"""`convert --dtype bfloat16`: fp32 weights rounded as torch rounds them, and what a side needs in fp32 left alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from megastream.cli.main import app
from megastream.convert.dtypes import cast
from tests.helpers.convert_models import converted, difference, random_tensor, tensors_of, write_family, write_hf

BIAS = "e_score_correction_bias"


def hard_floats() -> torch.Tensor:
    """fp32 in the middle of two bf16, right beside it, subnormal, at both ends, infinite, and NaN of any bits."""
    bf16 = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = torch.cat([bf16 + step for step in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    return bits.to(torch.uint32).view(torch.float32)


def test_bf16_rounds_as_torch_does() -> None:
    """Ties go to the even neighbour, upwards half of the times; what is beyond the largest bf16 is infinite."""
    floats = hard_floats()
    found = cast(floats.numpy(), "float32", "bfloat16")
    expected = floats.bfloat16()
    nan = expected.isnan().numpy()
    assert np.array_equal(found[~nan], expected.view(torch.uint16).numpy()[~nan]) and nan.sum() > 200
    assert np.isnan((found[nan].astype(np.uint32) << 16).view(np.float32)).all()
    ties = floats[(floats.view(torch.uint32).to(torch.int64) & 0xFFFF) == 0x8000]
    up = ties.bfloat16().float().abs() > ties.abs()
    assert 0.4 < up.float().mean() < 0.6, "ties that go both ways are among them"


def write_fp32(folder: Path) -> Path:
    """A DeepSeek-V3 in fp32 with a row of ties in every matrix."""
    source = write_family(folder, "deepseek_v3", torch_dtype="float32")
    tensors = {name: random_tensor(name, tuple(t.shape), torch.float32) for name, t in tensors_of(source).items()}
    for tensor in tensors.values():
        row = tensor.view(-1, tensor.shape[-1])[0]
        row.copy_(((row.view(torch.int32) & ~0xFFFF) | 0x8000).view(torch.float32))
    save_file(tensors, source / "model.safetensors")
    return source


def test_weights_are_rounded_and_correction_biases_are_not(tmp_path: Path) -> None:
    source = write_fp32(tmp_path / "hf")
    before = tensors_of(source)
    narrow = converted(source, tmp_path / "narrow", dtype="bfloat16")
    after = tensors_of(narrow)
    assert after.keys() == before.keys()
    wide = {name for name, tensor in after.items() if tensor.dtype == torch.float32}
    assert wide == {name for name in before if name.endswith(BIAS)} and wide
    for name, tensor in before.items():
        assert after[name].equal(tensor if name in wide else tensor.bfloat16()), name
    said = json.loads((narrow / "config.json").read_text())
    assert said == {**json.loads((source / "config.json").read_text()), "torch_dtype": "bfloat16"}
    assert difference(source, narrow) is not None, "verify compares values, and these were rounded"


@pytest.mark.parametrize(
    ("to", "layout"), [("torch_dist", None), ("mp_rank", "tp2 etp1 ep2"), ("sharded_state", "tp2")]
)
def test_all_forms_have_the_same_rounded_weights(tmp_path: Path, to: str, layout: str | None) -> None:
    source = write_fp32(tmp_path / "hf")
    narrow = converted(source, tmp_path / "narrow", dtype="bfloat16")
    ranks = converted(source, tmp_path / to, to, to_layout=layout, dtype="bfloat16")
    assert difference(ranks, narrow) is None
    back = converted(ranks, tmp_path / "back")
    assert (back / "model.safetensors").read_bytes() == (narrow / "model.safetensors").read_bytes()


def test_the_command_takes_it_and_bf16_stays_as_it_is(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    done = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "b"), "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.stderr
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (source / name).read_bytes()
