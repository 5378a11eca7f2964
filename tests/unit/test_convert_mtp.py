"""Layers of multi-token prediction through all forms: kept where a form has them, named where it has not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from megastream.cli.main import app
from megastream.convert.forms import Options
from megastream.convert.model import find_model
from megastream.convert.mtp import canonical_name
from megastream.convert.run import convert
from megastream.convert.types import ConvertError
from tests.helpers.convert_models import converted, difference, tensors_of, write_family, write_hf

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYOUT = "tp2 etp1 ep2 pp2(3,2)"


def _write(folder: Path, mtp_layers: int = 1, **more: Any) -> Path:
    return write_hf(folder, "glm4_moe", **{"layers": 5, "experts": 4, "mtp_layers": mtp_layers, **more})


def _changed(folder: Path, target: Path, **changes: torch.Tensor) -> Path:
    """The same folder with these tensors."""
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({**tensors_of(folder), **changes}, target / "model.safetensors", {"format": "pt"})
    return target


def _declaring(folder: Path, mtp_layers: int) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": mtp_layers}))
    return folder


def _bytes(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("mtp_layers", "layout"),
    [
        (1, LAYOUT),
        pytest.param(0, LAYOUT, marks=pytest.mark.full),
        pytest.param(3, "pp2(1,1,2,1) vpp2", marks=pytest.mark.full),
        pytest.param(3, "tp2 ep2 etp2", marks=pytest.mark.full),
    ],
)
def test_there_and_back(tmp_path: Path, mtp_layers: int, layout: str) -> None:
    source = _write(tmp_path / "hf", mtp_layers)
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout=layout)
    dist = converted(ranks, tmp_path / "dist", "torch_dist")
    for folder in (ranks, dist):
        assert _bytes(converted(folder, tmp_path / f"from-{folder.name}")) == _bytes(source)
        assert difference(source, folder) is None and difference(folder, source) is None
    if mtp_layers:
        name = f"model.layers.{4 + mtp_layers}.eh_proj.weight"
        value = tensors_of(source)[name]
        value[3, 50] += 1
        other = _changed(source, tmp_path / "other", **{name: value})
        assert all(name + "[3, 50] is " in str(difference(other, folder)) for folder in (ranks, dist))


@pytest.mark.full
@pytest.mark.parametrize("mtp_layers", [1, 3])
def test_deepseek_s_layers(tmp_path: Path, mtp_layers: int) -> None:
    """Their names are those that vLLM's draft model of it takes: a decoder layer's, three norms and a projection."""
    sizes = dict(num_hidden_layers=5, num_nextn_predict_layers=mtp_layers)
    source = write_family(tmp_path / "hf", "deepseek_v3", **sizes)
    inside: dict[int, set[str]] = {}
    for name in tensors_of(source):
        if match := re.match(r"model\.layers\.(\d+)\.(.+)\.weight", name):
            inside.setdefault(int(match[1]), set()).add(match[2])
    own = {"enorm", "hnorm", "eh_proj", "shared_head.norm"}
    assert set(inside) == set(range(5 + mtp_layers)) and "self_attn.kv_b_proj" in inside[4]
    assert all(inside[layer] == inside[4] | own for layer in range(5, 5 + mtp_layers))
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout=LAYOUT)
    dist = converted(ranks, tmp_path / "dist", "torch_dist")
    assert _bytes(converted(dist, tmp_path / "back")) == _bytes(source)
    assert difference(source, ranks) is None and difference(source, dist) is None


@pytest.mark.full
@pytest.mark.parametrize("form", ["hf", "mp_rank", "torch_dist"])
def test_files_without_them_are_a_model_without_them(tmp_path: Path, form: str) -> None:
    """Their config.json declares them all the same, as that of a model that was trained on without them."""
    source = _declaring(_write(tmp_path / "hf", 0), 1)
    folder = converted(source, tmp_path / "b", form, to_layout="tp2 pp5" if form == "mp_rank" else None)
    assert _bytes(converted(folder, tmp_path / "back")) == _bytes(source)
    with_them = _write(tmp_path / "with")
    for pair in ((folder, with_them), (with_them, folder)):
        with pytest.raises(ConvertError, match=rf"b \({form}\) lacks model.layers.5.input_layernorm.weight, .* more; "):
            difference(*pair)


def test_megatron_s_names_of_a_rank(tmp_path: Path) -> None:
    """The last stage has these layers, counted from 0, and an embedding of its own beside them."""
    source = _write(tmp_path / "hf", 2, layers=2)
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout="tp2 pp2 ep2 etp1")
    first, last = (
        torch.load(ranks / f"mp_rank_01_{stage:03}_001" / "model_optim_rng.pt", weights_only=False) for stage in (0, 1)
    )
    assert first["args"].mtp_num_layers == 2
    assert not [name for name in first["model"] if name.startswith("mtp.")]
    model, hf = last["model"], tensors_of(source)
    name = "embedding.word_embeddings.weight"
    assert model[name].equal(first["model"][name])
    prefix = "mtp.layers.1."
    for norm, ours in (("enorm", "enorm"), ("hnorm", "hnorm"), ("final_layernorm", "shared_head.norm")):
        assert model[f"{prefix}{norm}.weight"].equal(hf[f"model.layers.3.{ours}.weight"])
    assert model[f"{prefix}eh_proj.weight"].equal(hf["model.layers.3.eh_proj.weight"][24:])
    expert = model[f"{prefix}transformer_layer.mlp.experts.local_experts.1.linear_fc2.weight"]
    assert expert.equal(hf["model.layers.3.mlp.experts.3.down_proj.weight"])
    later = {name.replace("transformer_layer", "mtp_model_layer"): value for name, value in model.items()}
    torch.save({**last, "model": later}, ranks / "mp_rank_01_001_001" / "model_optim_rng.pt")
    assert difference(source, ranks) is None, "as later releases of megatron-core name it"


def test_copies_of_embedding_and_head_are_taken_if_equal(tmp_path: Path) -> None:
    source = _write(tmp_path / "hf", 2, layers=2)
    tensors = tensors_of(source)
    copies = {f"model.layers.{layer}.embed_tokens.weight": tensors[EMBEDDING].clone() for layer in (2, 3)}
    copies |= {f"model.layers.{layer}.shared_head.head.weight": tensors[HEAD].clone() for layer in (2, 3)}
    published = _changed(source, tmp_path / "published", **copies)
    assert _bytes(converted(published, tmp_path / "a")) == _bytes(source)
    assert difference(published, source) is None and difference(source, published) is None
    for number, (name, shared) in enumerate(zip(copies, (EMBEDDING, EMBEDDING, HEAD, HEAD), strict=True)):
        other = copies[name].clone()
        other[5, 6] += 1
        wrong = _changed(source, tmp_path / f"wrong{number}", **{**copies, name: other})
        with pytest.raises(ConvertError, match=rf"{shared}\[5, 6\] is .*; copies of one weight must be equal") as error:
            converted(wrong, tmp_path / "c")
        assert name in str(error.value)
        assert difference(source, wrong) and not (tmp_path / "c").exists()


def test_engines_get_the_rest_and_the_command_says_so(tmp_path: Path) -> None:
    source, run = _write(tmp_path / "hf", 2, layers=2), CliRunner()
    own = [name for name in tensors_of(source) if name.startswith(("model.layers.2.", "model.layers.3."))]
    target = tmp_path / "state"
    done = run.invoke(app, ["convert", str(source), str(target), "--to", "sharded_state", "--to-layout", "tp2 ep2"])
    said = f"as sharded_state has no layers of multi-token prediction: {len(own)} tensors, all of model.layers.2.*, "
    assert done.exit_code == 0 and f"left out, {said}model.layers.3.*" in done.output
    assert not [name for path in target.glob("*.safetensors") for name in tensors_of(target) if ".layers.2." in name]
    for pair in ((source, target), (target, source)):
        equal = run.invoke(app, ["verify", *map(str, pair)])
        assert equal.exit_code == 0 and f"not compared, {said}model.layers.3.*" in equal.output
    name = "model.layers.2.enorm.weight"
    other = _changed(source, tmp_path / "other", **{name: tensors_of(source)[name] + 1})
    assert difference(other, target) is None and difference(other, source) is not None
    without = _declaring(_write(tmp_path / "without", 0, layers=2), 2)
    assert _bytes(converted(target, tmp_path / "back")) == _bytes(without)
    quiet = run.invoke(app, ["verify", str(without), str(target)])
    assert quiet.exit_code == 0 and "multi-token" not in quiet.output


@pytest.mark.full
@pytest.mark.parametrize("form", ["mp_rank", "torch_dist"])
def test_layers_that_config_json_does_not_declare_are_refused(tmp_path: Path, form: str) -> None:
    layout = "tp1" if form == "mp_rank" else None
    folder = converted(_write(tmp_path / "hf", 2, layers=2), tmp_path / "b", form, to_layout=layout)
    words = r"mtp.layers.1.*: config.json says num_nextn_predict_layers is 1; give it"
    with pytest.raises(ConvertError, match=words) as error:
        converted(_declaring(folder, 1), tmp_path / "c")
    assert form == "torch_dist" or str(folder / "mp_rank_00" / "model_optim_rng.pt") in str(error.value)


def test_a_family_without_rows_for_them_refuses_megatron_s(tmp_path: Path) -> None:
    model = find_model(write_hf(tmp_path / "qwen", layers=2, experts=4), None)
    with pytest.raises(
        ConvertError, match=r"mtp.layers.0.enorm.weight: the table of family qwen3_moe has no rows for m"
    ):
        canonical_name("mtp.layers.0.enorm.weight", model)
    assert canonical_name("decoder.layers.1.input_layernorm.weight", model) == "decoder.layers.1.input_layernorm.weight"


@pytest.mark.full
def test_hugging_face_layers_that_are_not_declared_or_not_complete_are_refused(tmp_path: Path) -> None:
    source = _write(tmp_path / "hf", 1, layers=2)
    few = tensors_of(source)
    del few["model.layers.2.hnorm.weight"]
    save_file(few, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConvertError, match="lacks model.layers.2.hnorm.weight; fetch the rest of it"):
        converted(source, tmp_path / "b")
    with pytest.raises(ConvertError, match=r"model.layers.2\..* is no tensor of this glm4_moe; see its config.json"):
        converted(_declaring(source, 0), tmp_path / "b")
    with pytest.raises(ConvertError, match="num_nextn_predict_layers is 65; it is at most 64"):
        converted(_declaring(source, 65), tmp_path / "b")


@pytest.mark.full
def test_a_tied_head_is_refused_in_megatron_s_forms(tmp_path: Path) -> None:
    source = _write(tmp_path / "hf", 1, layers=2, tied=False)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "tie_word_embeddings": True}))
    tied = _changed(source, tmp_path / "tied", **{HEAD: tensors_of(source)[EMBEDDING].clone()})
    assert "model.layers.2.enorm.weight" in tensors_of(converted(tied, tmp_path / "b"))
    with pytest.raises(ConvertError, match="multi-token prediction with a tied head are converted from hf to hf only"):
        converted(tied, tmp_path / "c", "torch_dist")


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("hf", None),
        pytest.param("torch_dist", None, marks=pytest.mark.full),
        pytest.param("mp_rank", "tp2 pp2", marks=pytest.mark.full),
        pytest.param("sharded_state", "tp2", marks=pytest.mark.full),
    ],
)
def test_those_that_only_config_json_has_are_named(tmp_path: Path, form: str, layout: str | None) -> None:
    """What is written has the others only; an index lists no tensor that was not written."""
    source = _declaring(_write(tmp_path / "hf", 0, layers=2), 3)
    expected = tensors_of(_write(tmp_path / "with", 3, layers=2)).keys() - tensors_of(source).keys()
    options = Options(to=form, to_layout=layout, max_file_bytes=20_000)
    done = convert(source, tmp_path / "b", options, lambda done, total: None)
    assert set(done.mtp_absent) == expected and done.mtp_left_out == ()
    if form == "hf":
        index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == tensors_of(tmp_path / "b").keys() == tensors_of(source).keys()
    declared = _declaring(tmp_path / "b", 1)
    said = CliRunner().invoke(app, ["convert", str(declared), str(tmp_path / "c")]).output
    assert f"config.json declares, and {declared} does not have: {len(expected) // 3} tensors, all of " in said
    complete = CliRunner().invoke(app, ["convert", str(tmp_path / "with"), str(tmp_path / "d")])
    assert complete.exit_code == 0 and "multi-token" not in complete.output
