"""Every family in FAMILIES, against what is written by hand: a new one is taken up by itself, and needs a reference.

Its layouts, pair by pair: `test_family_pairs.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megastream.convert.types import ConvertError
from megastream.families import FAMILIES, load_shape
from megastream.families.refused import refused
from megastream.layout.box import Box
from megastream.layout.mesh import parse_engine_mesh, parse_trainer_mesh
from megastream.layout.shard import RankLayout, TensorSpec
from megastream.layout.synthetic import engine_layouts, trainer_layouts
from megastream.trainer.compat import UnsupportedTrainer
from megastream.trainer.refusals import refuse_family
from tests.helpers.convert_models import converted
from tests.helpers.layout_reference import Model, awkward, tiny
from tests.helpers.layout_world import differing, make_world
from tests.helpers.reference_families import REFERENCES, TINY


def test_every_family_has_a_reference() -> None:
    assert set(REFERENCES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_has_exactly_the_model_s_tensors(family: str) -> None:
    model = awkward(family)
    names = [spec.name for spec in model.family.tensors(model.shape)]
    shapes = {name: model.family.file_shape(name, model.shape) for name in names}
    assert shapes == {name: array.shape for name, array in model.tensors.items()}


VARIANTS = [
    ("qwen3_moe", {"mlp_only_layers": (0, 2)}),
    ("qwen2_moe", {"mlp_only_layers": (1,)}),
    ("glm4_moe", {"attention_bias": False, "use_qk_norm": False}),
    ("glm4_moe", {"n_shared_experts": 0}),
    ("deepseek_v2", {"q_lora_rank": None}),  # V2-Lite
    ("deepseek_v3", {"q_lora_rank": None}),  # Moonlight
    ("qwen3_next", {"mlp_only_layers": (1,)}),
    ("qwen3_next", {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_what_a_config_switches_off_is_not_there(family: str, changes: dict) -> None:
    model = Model(REFERENCES[family].config(**{**TINY, **REFERENCES[family].small, **changes}))
    assert {spec.name for spec in model.family.tensors(model.shape)} == set(model.tensors)
    world = make_world(model, "tp2 ep2 dp2", "tp2 ep2", trainer_stages=(3,), engine_stages=(3,), pad=4)
    assert differing(world, world.plan()) == []


def test_kimi_k2_is_a_deepseek_v3() -> None:
    assert load_shape(REFERENCES["deepseek_v3"].config(model_type="kimi_k2")).family == "deepseek_v3"


def test_qwen3_5_moe_is_refused_by_name() -> None:
    """Its files differ from Qwen3-Next's in names and layout."""
    with pytest.raises(ValueError, match="model family qwen3_5_moe has no table; known families: deepseek_v2"):
        load_shape(REFERENCES["qwen3_next"].config(model_type="qwen3_5_moe"))


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_from_strings_alone_are_those_of_the_ranks(family: str) -> None:
    """Same names, boxes, ranks and spare copies; offsets differ with the buckets, and so does padding."""
    model = tiny(family, False)
    trainer, engine = "tp2 etp1 ep4 dp2", "tp2 pp3"
    plant = make_world(model, trainer, engine, trainer_stages=(3,), engine_stages=(1, 1, 1), te=True, pad=4)
    sides = (
        (trainer_layouts(model.family, model.shape, parse_trainer_mesh(trainer)), plant.trainer),
        (engine_layouts(model.family, model.shape, parse_engine_mesh(engine)), plant.engine),
    )
    for ours, hand in sides:
        for one, other in zip(ours, hand, strict=True):
            assert _inside_layers(one) == _inside_layers(other)
            assert one.coords == other.coords and set(one.unused) == set(other.unused)


def _inside_layers(layout: RankLayout) -> set[tuple[str, Box]]:
    return {(shard.tensor, shard.box) for shard in layout.shards if ".layers." in shard.tensor}


FORMS = [
    ("hf", None, {"max_file_bytes": 400}),
    ("torch_dist", None, {}),
    ("mp_rank", "tp2 etp1 ep2 pp3", {}),
    ("sharded_state", "tp2 pp3", {}),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_converted_there_and_back(family: str, tmp_path: Path) -> None:
    model, source = tiny(family, False), tmp_path / "source"
    source.mkdir()
    save_file(model.tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(model.raw))
    for form, layout, options in FORMS:
        if model.family.trainer_differs and form in ("torch_dist", "mp_rank"):
            continue  # refused: see below
        there, back = tmp_path / form, tmp_path / f"{form}-back"
        converted(source, there, form, to_layout=layout, **options)
        converted(there, back, "hf", from_layout=layout, config=source / "config.json")
        found = load_file(back / "model.safetensors")
        assert found.keys() == model.tensors.keys()
        assert [name for name, array in model.tensors.items() if not np.array_equal(found[name], array)] == [], form


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias is True; qwen3 has a table for False only"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True; llama has a table for False only"),
        ("llama", {"intermediate_size": 0}, "intermediate_size is 0; it must be at least 1"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0; it must be at least 1"),
        ("glm4_moe", {"n_routed_experts": None}, "n_routed_experts is None; expected a whole number"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; deepseek_v2 has no table for"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias is True; deepseek_v2 has a table for False only"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; deepseek_v3 has a table for 'noaux_tc'"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be at least 1"),
        ("qwen3_next", {"tie_word_embeddings": True}, "tie_word_embeddings is True; qwen3_next has a table for False"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate is False; qwen3_next has a table for True"),
        ("qwen3_next", {"linear_num_value_heads": 20}, "linear_num_value_heads is 20, which linear_num_key_heads = 8"),
        ("qwen3_next", {"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is None; expected a whole number"),
        ("qwen3_next", {"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\]; expected"),
    ],
)
def test_configs_without_a_table_are_refused_by_field(family: str, changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=f"config.json field {words}"):
        load_shape(REFERENCES[family].config(**changes))


def test_a_delta_net_s_decay_is_fp32_where_vllm_keeps_it_so() -> None:
    """A_log, in files too; dt_bias is the model's type everywhere."""
    model = Model(REFERENCES["qwen3_next"].config(torch_dtype="bfloat16"))
    types = {name: (spec.dtype, *model.family.dtypes(name, model.shape)) for name, spec in specs_of(model).items()}
    assert {name.rpartition(".")[2] for name, found in types.items() if "float32" in found} == {"A_log"}
    assert types["model.layers.0.linear_attn.A_log"] == ("float32", "bfloat16", "float32")
    (layout,) = engine_layouts(model.family, model.shape, parse_engine_mesh("tp1"))
    dtypes = {spec.name: spec.dtype for spec in layout.buffers}
    assert dtypes["model.layers.0.linear_attn.A_log"] == "float32"
    assert dtypes["model.layers.0.linear_attn.dt_bias"] == "bfloat16"


def specs_of(model: Model) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in model.family.tensors(model.shape)}


@pytest.mark.parametrize(("form", "layout"), [("torch_dist", None), ("mp_rank", "tp2")])
def test_forms_of_a_trainer_that_computes_with_other_values_are_refused(
    form: str, layout: str | None, tmp_path: Path
) -> None:
    """To be written and, before anything else is said of them, to be read."""
    model, source = tiny("qwen3_next", False), tmp_path / "source"
    source.mkdir()
    save_file(model.tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(model.raw))
    words = f"qwen3_next has no {form} form here: Megatron keeps the norm behind a gated delta net less 1"
    with pytest.raises(ConvertError, match=words):
        converted(source, tmp_path / "there", form, to_layout=layout)
    stored = tmp_path / "stored" / (".metadata" if form == "torch_dist" else "mp_rank_00/model_optim_rng.pt")
    stored.parent.mkdir(parents=True)
    stored.touch()
    with pytest.raises(ConvertError, match=words):
        converted(tmp_path / "stored", tmp_path / "back", "hf", config=source / "config.json")


def test_a_trainer_that_computes_with_other_values_is_refused() -> None:
    """Before anything is asked of the model; and a plan, which counts bytes, says so."""
    model = tiny("qwen3_next", False)
    with pytest.raises(UnsupportedTrainer, match="qwen3_next is not supported: Megatron keeps the norm behind a gated"):
        refuse_family(model.family)
    assert ["a Megatron trainer" in found.why for found in refused(model.shape)] == [True]
    assert refuse_family(tiny("qwen3_moe", False).family) is None


@pytest.mark.parametrize(("family", "tensors"), [("glm4_moe", 5), ("deepseek_v3", 5)])
def test_correction_biases_stay_fp32_in_a_bf16_model(family: str, tensors: int) -> None:
    """O8: in the file, on the trainer and in the engine; they are late, because they change behind the step."""
    model = Model(REFERENCES[family].config(torch_dtype="bfloat16"))
    specs = [spec for spec in model.family.tensors(model.shape) if spec.dtype == "float32"]
    assert [spec.name.rpartition(".")[2] for spec in specs] == ["e_score_correction_bias"] * tensors
    assert {model.family.place(spec.name).kind for spec in specs} == {"late"}
    for layout in (
        *trainer_layouts(model.family, model.shape, parse_trainer_mesh("ep2"), ownership="slice"),
        *engine_layouts(model.family, model.shape, parse_engine_mesh("tp2")),
    ):
        dtypes = {spec.name: spec.dtype for spec in layout.buffers}
        held = {shard.tensor: dtypes[shard.buffer] for shard in layout.shards}
        assert {held[spec.name] for spec in specs} == {"float32"}
