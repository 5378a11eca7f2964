"""Files of `sharded_state` have the names that vLLM's own loader asks for, and both kinds of names are read.

What vLLM asks for is compared with a real one in `tests/engine/test_family_loads.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megastream.convert.types import ConvertError
from megastream.families import FAMILIES
from tests.helpers.convert_models import converted, difference, write_family, write_hf
from tests.helpers.layout_reference import tiny

SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
NAMES = {
    "qwen3_moe": {"mlp.gate.weight": "mlp.experts.gate.weight"},
    "qwen2_moe": {
        "mlp.shared_expert.down_proj.weight": "mlp.experts._shared_experts._layer.down_proj.weight",
        "mlp.shared_expert_gate.weight": "mlp.experts._shared_experts._layer.expert_gate.weight",
        "mlp.gate.weight": "mlp.gate.weight",
    },
    "qwen3_next": {
        "linear_attn.A_log": "linear_attn.A_log",
        "mlp.gate.weight": "mlp.experts.gate.weight",
        "mlp.shared_expert.down_proj.weight": "mlp.experts._shared_experts._layer.down_proj.weight",
        "mlp.shared_expert_gate.weight": "mlp.experts._shared_experts._layer.expert_gate.weight",
    },
    "glm4_moe": {
        "mlp.gate.e_score_correction_bias": "mlp.experts.routed_experts.e_score_correction_bias",
        "mlp.gate.weight": "mlp.gate.weight",
    },
    "deepseek_v3": {
        "mlp.gate.e_score_correction_bias": "mlp.experts.gate.e_score_correction_bias",
        "self_attn.q_b_proj.weight": "self_attn.mla_attn.q_b_proj.weight",
        "self_attn.kv_b_proj.weight": "self_attn.kv_b_proj.weight",
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_the_first_of_their_aliases(family: str) -> None:
    """One to one, never behind the name that they replace, and there and back."""
    model = tiny(family, False)
    names = list(model.family.engine_names(model.shape, range(model.shape.num_layers)))
    renamed = {name: model.family.state_name(name) for name in names}
    assert len(set(renamed.values())) == len(names)
    assert all(new <= name and model.family.engine_name(new) == name for name, new in renamed.items())
    last = f"model.layers.{model.shape.num_layers - 1}."
    for name, new in NAMES.get(family, {}).items():
        assert renamed[last + name] == last + new


def test_files_have_vllm_s_names_and_scales(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", "qwen2_moe", layers=2, experts=4)
    state = converted(source, tmp_path / "state", "sharded_state", to_layout="tp2 pp2", max_file_bytes=20_000)
    files = sorted(state.glob("model-pp-1-tp-0-part-*.safetensors"))
    held = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert len(files) > 1 and "model.layers.1.mlp.experts._shared_experts._layer.expert_gate.weight" in held
    scales = {name: tensor for name, tensor in held.items() if name.endswith(SCALES)}
    assert sorted(scales) == sorted(f"model.layers.1.self_attn.attn.{name}" for name in SCALES)
    assert all(tensor.shape == () and tensor.dtype == torch.float32 and tensor == 1 for tensor in scales.values())
    assert difference(state, source) is None


def test_layers_without_attention_have_no_scales(tmp_path: Path) -> None:
    source = write_family(tmp_path / "hf", "qwen3_next")
    state = converted(source, tmp_path / "state", "sharded_state", to_layout="tp1")
    held = load_file(state / "model-rank-0-part-0.safetensors")
    scales = {name for name in held if name.endswith(SCALES)}
    assert scales == {f"model.layers.1.self_attn.attn.{name}" for name in SCALES}
    assert held["model.layers.0.linear_attn.A_log"].dtype == torch.float32
    assert held["model.layers.0.linear_attn.dt_bias"].dtype == torch.bfloat16


def test_the_names_of_our_tables_are_read_too(tmp_path: Path) -> None:
    """Without scales, as an earlier release wrote them."""
    source = write_hf(tmp_path / "hf", layers=2, experts=4)
    state = converted(source, tmp_path / "state", "sharded_state", to_layout="tp2 ep2")
    for path in state.glob("*.safetensors"):
        held = {name.replace("experts.gate.", "gate."): tensor for name, tensor in load_file(path).items()}
        save_file({name: tensor for name, tensor in held.items() if not name.endswith(SCALES)}, path)
        assert "model.layers.0.mlp.gate.weight" in load_file(path)
    assert difference(state, source) is None
    held["model.layers.0.mlp.experts.gate.weight"] = held["model.layers.0.mlp.gate.weight"].clone()
    save_file(held, path)
    with pytest.raises(ConvertError, match=r"model.layers.0.mlp.gate.weight is in .* and in .*; keep one"):
        converted(state, tmp_path / "back")


def test_scales_of_a_quantized_cache_are_refused(tmp_path: Path) -> None:
    state = converted(
        write_hf(tmp_path / "hf", layers=2, experts=4), tmp_path / "state", "sharded_state", to_layout="tp1"
    )
    path = state / "model-rank-0-part-0.safetensors"
    held = load_file(path)
    held["model.layers.1.self_attn.attn._v_scale"] = torch.tensor(0.5)
    save_file(held, path)
    with pytest.raises(ConvertError, match="_v_scale is not 1; scales of a quantized cache are not converted"):
        converted(state, tmp_path / "back")
    assert json.loads((state / "config.json").read_text())["model_type"] == "qwen3_moe"
