"""Hugging Face folders, cut anew and compared: by safetensors' own reader and writer, never by ours alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from megastream.cli.main import app
from megastream.convert import dtypes
from megastream.convert.safetensors_file import layout_file, read_header
from megastream.convert.types import ConvertError
from megastream.layout.shard import TensorSpec
from tests.helpers.convert_models import converted, difference, names_of, tensors_of, write_hf

INDEX = "model.safetensors.index.json"


def test_files_are_cut_anew_and_put_together_again(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "a")
    many = converted(source, tmp_path / "b", max_file_bytes=30_000)
    one = converted(many, tmp_path / "c")
    index = json.loads((many / INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 5 and list(index["weight_map"]) == sorted(names_of(source))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(source).values())
    assert sorted(path.name for path in one.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    for folder in (many, one):
        there = tensors_of(folder)
        assert all(there[name].equal(tensor) for name, tensor in tensors_of(source).items())
    # safetensors' own writer gives these very bytes.
    assert (one / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert difference(source, many) is None and difference(many, one) is None


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_transformers_reads_it(tmp_path: Path, family: str) -> None:
    """Several files with their index, written from files of ranks: the same parameters, and the same logits in fp32."""
    from transformers import AutoModelForCausalLM

    source = write_hf(tmp_path / "a", family, dtype=torch.float32)
    ranks = converted(source, tmp_path / "ranks", "mp_rank", to_layout="tp2 etp1 ep2 pp2")
    many = converted(ranks, tmp_path / "b", max_file_bytes=60_000)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (source, many)]
    stored = tensors_of(source)
    assert stored["model.norm.weight"].equal(models[1].state_dict()["model.norm.weight"])
    tokens = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        logits = [model(tokens).logits for model in models]
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 and logits[0].std() > 0.1
    parameters = [dict(model.named_parameters()) for model in models]
    assert all(parameters[0][name].equal(value) for name, value in parameters[1].items())


def test_a_header_of_mixed_dtypes_is_that_of_safetensors(tmp_path: Path) -> None:
    types = {"b": torch.float32, "a": torch.bfloat16, "c": torch.float16, "d": torch.float32, "e": torch.float8_e4m3fn}
    types |= {"a2": torch.float8_e4m3fn, "e2": torch.float16}
    tensors = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in types.items()}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file, starts = layout_file("x", [TensorSpec(name, (2, 3), str(dtype)[6:]) for name, dtype in types.items()])
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert file.num_bytes == len(raw) and raw.startswith(file.fixed[0][1])
    assert {name: entry.start for name, entry in read_header(tmp_path / "x.safetensors").items()} == starts


def test_verify_names_the_first_difference(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "a")
    tensors = tensors_of(source)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    tensors[name][7, 11], tensors[name][9, 3] = 0.5, 8.0
    was = tensors_of(source)[name][7, 11].item()
    other = write_hf(tmp_path / "b")
    save_file(tensors, other / "model.safetensors")
    assert difference(source, other) == f"{name}[7, 11] is {was:.9g} in one and 0.5 in the other"


def test_verify_compares_values_not_types(tmp_path: Path) -> None:
    narrow, wide = write_hf(tmp_path / "a"), write_hf(tmp_path / "b")
    tensors = {name: tensor.float() for name, tensor in tensors_of(narrow).items()}
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, wide / "model.safetensors")
    assert "model.norm.weight[3]" in (difference(narrow, wide) or "")
    also = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(also, narrow / "model.safetensors")
    assert difference(narrow, wide) is None, "NaN is NaN"


def test_casts_round_as_torch_does() -> None:
    values = torch.cat([torch.randn(4096), torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 3e38])])
    values = torch.cat(
        [values, torch.tensor([0x3F808000, 0x3F818000, 0x7F800001], dtype=torch.int32).view(torch.float32)]
    )
    ours = torch.from_numpy(dtypes.cast(values.numpy(), "float32", "bfloat16").view("int16")).view(torch.bfloat16)
    assert torch.equal(ours.isnan(), values.isnan())
    assert torch.equal(ours.nan_to_num(7.0).view(torch.int16), values.bfloat16().nan_to_num(7.0).view(torch.int16))


def test_a_config_of_another_name_comes_alone(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "a", layers=2, experts=4)
    (source / "config.json").rename(tmp_path / "tiny.json")
    (tmp_path / "other.json").write_text("{}")
    target = converted(source, tmp_path / "b", config=tmp_path / "tiny.json")
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]


def test_tied_weights_may_be_stored_twice_if_equal(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "a", tied=True)
    tensors = tensors_of(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    assert "lm_head.weight" not in tensors_of(converted(source, tmp_path / "b"))
    tensors["lm_head.weight"][4, 5] += 1
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConvertError, match=r"model.embed_tokens.weight\[4, 5\] is .* lm_head.weight in .*model.safet"):
        converted(source, tmp_path / "c")


def test_command_line(tmp_path: Path) -> None:
    source, run = write_hf(tmp_path / "a"), CliRunner()
    target = str(tmp_path / "b")
    done = run.invoke(app, ["convert", str(source), target, "--max-file-gb", "0.0001"])
    assert done.exit_code == 0 and "tensors" in done.output
    again = run.invoke(app, ["convert", str(source), target])
    assert again.exit_code == 2 and "exists; remove it, or give --overwrite" in again.stderr
    assert len(again.stderr.splitlines()) == 1
    assert run.invoke(app, ["convert", str(source), target, "--overwrite"]).exit_code == 0
    equal = run.invoke(app, ["verify", str(source), target])
    assert equal.exit_code == 0 and "equal" in equal.output
    tensors = tensors_of(source)
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, Path(target) / "model.safetensors")
    differs = run.invoke(app, ["verify", str(source), target])
    assert differs.exit_code == 1 and "model.norm.weight[3]" in differs.stderr
    assert run.invoke(app, ["convert", str(source), str(tmp_path / "c"), "--to", "gguf"]).exit_code == 2
