"""What the trainer reads of a Hugging Face checkpoint: only numbers that are the weights, only whole files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megastream.layout.box import Box
from megastream.layout.shard import Shard
from megastream.trainer.hf_files import HuggingFaceFiles

SHARD = Shard("w", Box((1, 0), (3, 4)), 0, "b", 0, (4, 1))


def read(folder: Path) -> torch.Tensor:
    with HuggingFaceFiles(folder) as checkpoint:
        return checkpoint.read(SHARD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_box_is_read_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(16).view(4, 4).to(dtype)
    save_file({"w": values}, tmp_path / "model.safetensors")
    assert torch.equal(read(tmp_path), values[1:3])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_what_needs_scales_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    """torch would cast it to the model's dtype without a word."""
    save_file({"w": torch.ones(4, 4).to(dtype), "w_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"w in .* has dtype \w+, and only BF16, F16, F32 are loaded; convert"):
        read(tmp_path)


@pytest.mark.parametrize("left", [0, 4, -1])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, left: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4, 4)}, path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read \(.*\); copy or download it again"):
        read(tmp_path)
