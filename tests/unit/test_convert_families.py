"""Every family, as soon as it has a table and a small model: through all forms and back to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from megastream.convert.forms import Options
from megastream.convert.run import convert
from megastream.convert.types import ConvertError
from megastream.families import FAMILIES, load_shape
from tests.helpers.convert_models import converted, difference, tensors_of, write_family
from tests.unit.test_convert_masters import stored

FEW = ("deepseek_v3",)
"""With the default tests; the two Qwens stand in other tests."""
NO_TRAINER = ("qwen3_next",)
"""Megatron computes with other values."""
PARAMS = [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in sorted(FAMILIES)]


@pytest.mark.parametrize("name", PARAMS)
def test_all_forms_of_a_family(tmp_path: Path, name: str) -> None:
    source = write_family(tmp_path / "hf", name)
    parted = load_shape(source).num_experts > 0
    trainer, engine = ("tp2 etp1 ep2 pp3", "tp2 ep2 pp2") if parted else ("tp2 pp3", "tp2 pp2")
    folders = [] if name in NO_TRAINER else [converted(source, tmp_path / "ranks", "mp_rank", to_layout=trainer)]
    state = converted([source, *folders][-1], tmp_path / "state", "sharded_state", to_layout=engine)
    folders.append(state)
    if name in NO_TRAINER:
        with pytest.raises(ConvertError, match="no torch_dist form here"):
            converted(state, tmp_path / "dist", "torch_dist")
    else:
        folders.append(converted(state, tmp_path / "dist", "torch_dist"))
    back = converted(folders[-1], tmp_path / "back")
    assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    for folder in folders:
        assert difference(folder, source) is None


def test_layers_for_speculative_decoding_are_left_out_by_name(tmp_path: Path) -> None:
    """As transformers and vLLM read them, but said; any other unknown tensor is refused."""
    source = write_family(tmp_path / "hf", "qwen3_next")
    plain = converted(source, tmp_path / "plain")
    for number, name in enumerate(("mtp.fc.weight", "mtq.fc.weight")):
        save_file({name: torch.ones(2, 2)}, source / f"more-{number}.safetensors")
        if number == 0:
            done = convert(source, tmp_path / "one", Options(), lambda done, total: None)
            assert done.left_out == ("mtp.fc.weight",) and done.num_tensors == len(tensors_of(plain))
            assert (tmp_path / "one" / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    with pytest.raises(ConvertError, match="mtq.fc.weight is no tensor of this qwen3_next"):
        converted(source, tmp_path / "other")


LATENT_NORMS = {f"{latent}_layernorm.weight": f"linear_{latent}_up_proj.layer_norm_weight" for latent in ("q", "kv")}
"""Of megatron's local spec, and of Transformer Engine's."""


def test_latents_norms_have_a_name_in_each_spec(tmp_path: Path) -> None:
    """Written as keys under both, and read under Transformer Engine's alone, in keys and in files of ranks."""
    source = write_family(tmp_path / "hf", "deepseek_v3")
    keys = stored(converted(source, tmp_path / "dist", "torch_dist"))
    for local, fused in LATENT_NORMS.items():
        names = [name for name in keys if name.endswith(f".self_attention.{local}")]
        assert len(names) == 3
        assert all(keys.pop(name).equal(keys[name.replace(local, fused)]) for name in names)
    dcp.save(keys, checkpoint_id=tmp_path / "keys", no_dist=True)
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout="tp1")
    file = ranks / "mp_rank_00" / "model_optim_rng.pt"
    held = torch.load(file, weights_only=False)
    for local, fused in LATENT_NORMS.items():
        held["model"] = {name.replace(local, fused): tensor for name, tensor in held["model"].items()}
    torch.save(held, file)
    for folder in (tmp_path / "keys", ranks):
        back = converted(folder, tmp_path / f"from-{folder.name}", config=source)
        assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_what_a_side_keeps_in_fp32_is_fp32_there(tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", "deepseek_v3")
    state = converted(source, tmp_path / "state", "sharded_state", to_layout="tp1")
    types = {name: tensor.dtype for name, tensor in tensors_of(state).items()}
    wide = [name for name, dtype in types.items() if dtype == torch.float32]
    biases = [name for name in wide if "bias" in name]
    assert biases and all(name in biases or name.endswith("_scale") for name in wide)
    assert types["model.norm.weight"] == torch.bfloat16
