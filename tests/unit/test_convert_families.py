"""Every family, as soon as it has a table and a small model: through all forms and back to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megastream.convert.types import ConvertError
from megastream.families import FAMILIES, load_shape
from tests.helpers.convert_models import converted, difference, tensors_of, write_family

FEW = ("deepseek_v3",)
"""With the default tests; the two Qwens stand in other tests."""
NO_TORCH_DIST = ("gpt_oss",)
"""Interleaved rows of w1 and w3: Megatron's boxes cannot be cut from them."""
PARAMS = [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in sorted(FAMILIES)]


@pytest.mark.parametrize("name", PARAMS)
def test_all_forms_of_a_family(tmp_path: Path, name: str) -> None:
    source = write_family(tmp_path / "hf", name)
    parted = load_shape(source).num_experts > 0
    trainer, engine = ("tp2 etp1 ep2 pp3", "tp2 ep2 pp2") if parted else ("tp2 pp3", "tp2 pp2")
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout=trainer)
    state = converted(ranks, tmp_path / "state", "sharded_state", to_layout=engine)
    folders = [ranks, state]
    if name in NO_TORCH_DIST:
        with pytest.raises(ConvertError, match="no torch_dist form here; use hf, mp_rank or sharded_state"):
            converted(state, tmp_path / "dist", "torch_dist")
    else:
        folders.append(converted(state, tmp_path / "dist", "torch_dist"))
    back = converted(folders[-1], tmp_path / "back")
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    for folder in folders:
        assert difference(folder, source) is None


def test_what_a_side_keeps_in_fp32_is_fp32_there(tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", "deepseek_v3")
    state = converted(source, tmp_path / "state", "sharded_state", to_layout="tp1")
    types = {name: tensor.dtype for name, tensor in tensors_of(state).items()}
    wide = [name for name, dtype in types.items() if dtype == torch.float32]
    biases = [name for name in wide if "bias" in name]
    assert biases and all(name in biases or name.endswith("_scale") for name in wide)
    assert types["model.norm.weight"] == torch.bfloat16
