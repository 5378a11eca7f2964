"""Layouts that do not divide, and versions that are not supported, in one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastream.families import load_shape
from megastream.trainer import compat
from megastream.trainer.config import TrainerConfig, check_layout
from tests.helpers.tiny import hf_config, tiny_config, tiny_glm4, tiny_qwen2

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        (dict(pp=3), 3, "layers=4 by pp=3"),
        (dict(pp=2, vpp=3), 2, "layers=4 by pp*vpp=6"),
        (dict(tp=3), 3, "heads=8 by tp=3"),
        (dict(tp=8), 8, "kv_groups=4 by tp=8"),
        (dict(ep=3), 3, "experts=8 by ep=3"),
        (dict(pp=2, ep=4), 4, "ranks=4 by etp*ep*pp=8"),
        (dict(tp=2, pp=2), 6, "ranks=6 by tp*pp=4"),
        (dict(tp=2, vocab=101), 2, "vocab=101 by tp=2"),
        (dict(tp=2, etp=4, expert_ffn=18), 4, "expert_ffn=18 by etp=4"),
        (dict(tp=0), 1, "tp*pp=0"),
        (dict(cp=2, pp=2), 6, "ranks=6 by tp*cp*pp=4"),
        (dict(tp=2, cp=3), 6, "max_sequence=16 by tp*2*cp=12"),
        (dict(tp=2, shared_ffn=27), 2, "shared_ffn=27 by tp=2"),
        (dict(tp=2, dense_layers=1, dense_ffn=27), 2, "dense_ffn=27 by tp=2"),
    ],
)
def test_what_does_not_divide_is_named(settings: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match="layout does not divide") as caught:
        check_layout(tiny_config(**settings), world_size)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_virtual_stages_need_stages() -> None:
    with pytest.raises(ValueError, match="vpp=2 needs pipeline stages"):
        check_layout(tiny_config(vpp=2), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(mtp_layers=1, tied=True), "setting mtp_layers=1 is not supported: with a tied .*; set mtp_layers to 0"),
        (dict(mtp_layers=1, cp=2), "setting mtp_layers=1 is not supported: it was never run .*; set mtp_layers to 0"),
        (dict(mtp_layers=1, pp=2, stage_layers=(4, 0)), "mtp_layers=1 is not supported: the last stage needs a layer"),
        (dict(pp=2, stage_layers=(1, 2, 1)), r"stage_layers=\[1, 2, 1\] does not fit pp=2, vpp=1; give 2 numbers"),
        (dict(pp=2, vpp=2, stage_layers=(2, 0, 1, 1)), r"\[2, 0, 1, 1\] has a stage with nothing on it"),
        (dict(pp=2, stage_layers=(2, 3)), r"\[2, 3\] has 5 layers, the model 4; change one"),
    ],
)
def test_features_that_are_not_supported_are_named_with_the_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_layout(tiny_config(**settings), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(rope_theta=5e5, norm_eps=1e-5),
        tiny_qwen2(tied=True),
        tiny_glm4(router_bias_rate=1e-3),
        tiny_glm4(router_bias_rate=1e-3, qkv_bias=False, qk_norm=False, dense_layers=0, shared_ffn=0, rope_part=1.0),
    ],
)
def test_a_hugging_face_config_makes_the_trainer_s(config: TrainerConfig) -> None:
    shape = load_shape(hf_config(config))
    assert TrainerConfig.of(shape, max_sequence=config.max_sequence, seed=config.seed) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("mlp_only_layers", [0]),
        ("decoder_sparse_step", 2),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ],
)
def test_fields_that_the_model_does_not_have_are_refused(field: str, value: Any) -> None:
    """Otherwise the trainer would compute something else than the engine, without a word."""
    shape = load_shape({**hf_config(tiny_config()), field: value})
    name = "rope_type" if field == "rope_scaling" else field
    with pytest.raises(ValueError, match=f"config.json field {name}=.* is not supported by the trainer's own model"):
        TrainerConfig.of(shape, max_sequence=16)


@pytest.mark.parametrize(
    ("field", "value"), [("n_group", 2), ("topk_group", 2), ("moe_layer_freq", 2), ("norm_topk_prob", False)]
)
def test_routers_that_megatron_does_not_have_are_refused(field: str, value: Any) -> None:
    shape = load_shape({**hf_config(tiny_glm4()), field: value})
    with pytest.raises(ValueError, match=f"config.json field {field}=.* is not supported by the trainer's own model"):
        TrainerConfig.of(shape, max_sequence=16)


def test_a_rotated_part_is_read_where_transformers_5_writes_it() -> None:
    raw = hf_config(tiny_glm4())
    del raw["rope_theta"], raw["partial_rotary_factor"]
    rope = {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25}
    found = TrainerConfig.of(load_shape({**raw, "rope_parameters": rope}), max_sequence=16)
    assert (found.rope_theta, found.rope_part) == (2e4, 0.25)
    assert TrainerConfig.of(load_shape(raw), max_sequence=16).rope_part == 0.5


def test_quantized_weights_are_refused() -> None:
    """Without their scales they are other weights."""
    shape = load_shape({**hf_config(tiny_config()), "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}})
    with pytest.raises(ValueError, match=r"quantization_config \(fp8\) is not supported: .*; convert the checkpoint"):
        TrainerConfig.of(shape, max_sequence=16)


def test_a_family_that_is_not_built_is_refused_by_name() -> None:
    shape = load_shape({**hf_config(tiny_config()), "model_type": "llama"})
    with pytest.raises(ValueError, match="llama is not built by .* model, only glm4_moe, qwen2_moe and qwen3_moe"):
        TrainerConfig.of(shape, max_sequence=16)


def test_biases_that_no_row_has_are_refused() -> None:
    """transformers would put them on queries, keys, values and outputs."""
    with pytest.raises(ValueError, match="attention_bias is True; qwen3_moe has a table for False only"):
        load_shape({**hf_config(tiny_config()), "attention_bias": True})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("head_dim", 8, "head_dim is 8; a Qwen2-MoE has hidden_size / num_attention_heads = 6"),
        ("qkv_bias", False, "qkv_bias is False; a Qwen2-MoE always has these biases"),
        ("shared_expert_intermediate_size", 0, "shared_expert_intermediate_size is 0"),
        ("shared_expert_intermediate_size", None, "shared_expert_intermediate_size is None"),
    ],
)
def test_a_qwen2_that_vllm_would_not_serve_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_shape({**hf_config(tiny_qwen2()), field: value})


@pytest.mark.parametrize(
    "good",
    [dict(), dict(pp=2, ep=2), dict(tp=4, ep=2, etp=1, vocab=104), dict(pp=2, vpp=2), dict(pp=2, stage_layers=(0, 4))],
)
def test_what_divides_passes(good: dict[str, Any]) -> None:
    check_layout(tiny_config(**good), 4)


def test_the_range_is_the_one_of_versions_env() -> None:
    lines = (ROOT / "versions.env").read_text().splitlines()
    pinned = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert pinned["MEGATRON_CORE_MIN"] == compat.MEGATRON_CORE_MIN
    assert pinned["MEGATRON_CORE_BELOW"] == compat.MEGATRON_CORE_BELOW
    assert compat.check_version() == pinned["MEGATRON_CORE"]


@pytest.mark.parametrize("version", ["0.16.1", "0.17.0", "0.19.2", "0.19.2rc1+cu13"])
def test_versions_in_the_range_pass(version: str) -> None:
    assert compat.check_version(version) == version


@pytest.mark.parametrize("version", ["0.16.0", "0.15.3", "0.20.0", "0.20rc0", "1.0"])
def test_versions_outside_the_range_are_refused_with_it(version: str) -> None:
    with pytest.raises(compat.UnsupportedTrainer, match=rf"{version} is not supported; .*>= 0.16.1 and < 0.20"):
        compat.check_version(version)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rope_theta", "1e4", "rope_theta is '1e4', a number is wanted"),
        ("rms_norm_eps", None, "rms_norm_eps is None, a number is wanted"),
        ("rope_parameters", [1], r"rope_parameters is \[1\], an object is wanted"),
        ("rope_parameters", {"rope_theta": {}}, r"rope_theta is \{\}, a number is wanted"),
    ],
)
def test_a_number_that_is_none_is_named(field: str, value: Any, words: str) -> None:
    shape = load_shape({**hf_config(tiny_config()), field: value})
    with pytest.raises(ValueError, match=f"config.json field {words}"):
        TrainerConfig.of(shape, max_sequence=16)
