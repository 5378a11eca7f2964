"""What the trainer reads of a Hugging Face checkpoint: only numbers that are the weights, each from one place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megastream.families import family_of, load_shape
from megastream.layout.box import Box
from megastream.layout.shard import Shard, TensorSpec
from megastream.trainer.hf_files import INDEX, HuggingFaceFiles, tied_names
from tests.helpers.tiny import hf_config, tiny_config

SHARD = Shard("w", Box((1, 0), (3, 4)), 0, "b", 0, (4, 1))
W = TensorSpec("w", (4, 4), "float32")


def read(folder: Path) -> torch.Tensor:
    with HuggingFaceFiles(folder, [W], {"w": "head"}) as checkpoint:
        return checkpoint.read(SHARD)


def write_index(folder: Path, **placed: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))


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


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """The last file would win, whichever that is."""
    for number, name in enumerate(("a.safetensors", "b.safetensors")):
        save_file({"w": torch.full((4, 4), float(number)), name: torch.ones(1)}, tmp_path / name)
    with pytest.raises(ValueError, match=r"w is in a\.safetensors and in b\.safetensors; keep one of the files"):
        read(tmp_path)


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    """A file beside them, as some repositories have it, is not read; an index of other files is refused."""
    save_file({"w": torch.ones(4, 4)}, tmp_path / "model-1.safetensors")
    save_file({"w": torch.zeros(4, 4), "x": torch.ones(1)}, tmp_path / "z-consolidated.safetensors")
    write_index(tmp_path, w="model-1.safetensors")
    assert read(tmp_path).eq(1).all()
    write_index(tmp_path, w="z-consolidated.safetensors")
    with pytest.raises(ValueError, match=rf"x is in z-cons.*, not in {INDEX}; the index belongs to other files"):
        read(tmp_path)
    write_index(tmp_path, w="model-1.safetensors", y="model-1.safetensors")
    with pytest.raises(ValueError, match=rf"y is in {INDEX}, not in model-1"):
        read(tmp_path)
    for gone in ("gone.safetensors", "../model-1.safetensors"):
        write_index(tmp_path, w=gone)
        with pytest.raises(ValueError, match=f"names {re.escape(gone)}, which is not there; copy it too"):
            read(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ValueError, match=f"{INDEX} cannot be read"):
        read(tmp_path)


def test_a_tied_head_that_is_stored_must_be_equal(tmp_path: Path) -> None:
    embed = torch.arange(16.0).view(4, 4)
    embed[1, 1] = float("nan")
    save_file({"w": embed, "head": embed.clone()}, tmp_path / "model.safetensors")
    assert read(tmp_path)[1].equal(embed[2])
    head = embed.clone()
    head[0, 0] = -1  # not in what this rank reads
    save_file({"w": embed, "head": head}, tmp_path / "model.safetensors")
    assert read(tmp_path)[1].equal(embed[2])
    head[2, 3] = -1
    save_file({"w": embed, "head": head}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"w\[2, 3\] is 11 and head\[2, 3\] is -1, but this model ties them"):
        read(tmp_path)
    save_file({"w": embed, "head": embed[:3].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"head in .* has shape \(3, 4\); the model needs \(4, 4\)"):
        read(tmp_path)


def test_which_names_are_tied() -> None:
    for tied, names in ((True, {"model.embed_tokens.weight": "lm_head.weight"}), (False, {})):
        shape = load_shape(hf_config(tiny_config(tied=tied)))
        assert tied_names(family_of(shape), shape) == names


@pytest.mark.parametrize("shape", [(5, 4), (4, 5), (3, 4), (4, 4, 1), (4,)])
def test_another_shape_is_refused_larger_ones_too(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_file({"w": torch.ones(shape)}, tmp_path / "model.safetensors")
    words = re.escape(f"has shape {shape}; the model needs (4, 4)")
    with pytest.raises(ValueError, match=words):
        read(tmp_path)
