"""`megastream plan`: models by name, both grammars, refused tensors, types, and the map as one HTML file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megastream.cli.main import app
from megastream.families import ModelShape, family_of, load_shape
from megastream.families.contract import contract
from megastream.families.refused import refused
from megastream.families.shipped import num_parameters, shape_of_model, shipped, shipped_models
from megastream.plan.hardware import PROFILES
from tests.helpers.fp8_reference import LINEAR
from tests.helpers.layout_reference import config

PARAMETERS = {
    "DeepSeek-V3": 671_026_419_200,
    "GLM-4.5-Air": 106_852_251_264,
    "GPT-OSS-120B": 116_829_156_672,
    "Kimi-K2": 1_026_408_232_448,
    "Mixtral-8x22B": 140_620_634_112,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-Next-80B-A3B": 79_674_391_296,
}
"""Added up by hand from the fields: embedding and head, attention or delta net, norms, router and its bias, experts."""

UNIT = {"T": 1e12, "B": 1e9, "M": 1e6}


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def as_json(*arguments: str) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shipped_model_has_the_published_number_of_parameters(name: str) -> None:
    """To the precision with which it is published: 30.5B is three digits.

    GLM-4.5-Air's 106B leaves embedding and head out; with them it has 106.85B. Prediction layers are in no count.
    """
    entry, shape = shipped(name), shape_of_model(name)
    total, counted = num_parameters(shape), entry["parameters"].get("counted")
    assert total == PARAMETERS[name]
    assert counted in (None, "without embedding and head") and (counted is None) == (name != "GLM-4.5-Air")
    total -= 2 * shape.vocab * shape.hidden if counted else 0
    published = entry["parameters"]["published"]
    digits = len(published[:-1].partition(".")[2])
    assert round(total / UNIT[published[-1]], digits) == float(published[:-1])
    assert entry["sources"] and entry["parameters"]["from"]


def test_every_shipped_model_is_sourced_and_planned() -> None:
    assert set(shipped_models()) == {*PARAMETERS, "tiny-qwen3-moe", "tiny-qwen2-moe"}
    assert all(shipped(name)["sources"] and shape_of_model(name).num_layers for name in shipped_models())
    words = run("--model", "Qwen4", "--trainer", "pp2", "--engine", "tp1", code=2)
    assert "no model Qwen4" in words and "Qwen3-30B-A3B" in words and words.count("\n") == 1


def test_both_grammars_are_one_plan() -> None:
    one = as_json("--model", "tiny-qwen3-moe", "--trainer", "tp2 etp1 pp2(3,5) ep4 dp2", "--engine", "tp2 dp2 ep4")
    other = as_json(
        "--model", "tiny-qwen3-moe", "--trainer", "tp=2,etp=1,pp=2(3,5),ep=4,dp=2", "--engine", "tp=2,dp=2,ep=4"
    )
    assert one == other and one["engine"]["ranks"] == 4 and one["trainer"]["ranks"] == 8


@pytest.mark.parametrize(
    ("engine", "words"),
    [("tp8 ep4", "write ep8"), ("tp2 dp4 ep2", "write ep8"), ("tp=4,dp=2,ep=4", "write ep8"), ("vpp2", "vpp=2")],
)
def test_an_engine_has_the_expert_parallelism_that_vllm_gives_it(engine: str, words: str) -> None:
    told = run("--model", "tiny-qwen3-moe", "--trainer", "pp2 ep2", "--engine", engine, code=2)
    assert words in told and told.count("\n") == 1


def test_engine_replicas_each_get_their_bytes() -> None:
    """Data-parallel engine ranks hold dense weights each for itself and share the experts."""
    single = as_json("--model", "tiny-qwen3-moe", "--trainer", "ep2", "--engine", "tp2 ep2")
    double = as_json("--model", "tiny-qwen3-moe", "--trainer", "ep2", "--engine", "tp2 dp2 ep4")
    shape = shape_of_model("tiny-qwen3-moe")
    experts = 2 * 3 * shape.num_layers * shape.num_experts * shape.hidden * shape.expert_ffn
    assert double["bytes"] - experts == 2 * (single["bytes"] - experts)
    assert double["bytes"] == double["bytes_floor"]


def test_the_report_names_the_busiest_and_what_staging_takes() -> None:
    report = as_json("--model", "tiny-qwen3-moe", "--trainer", "pp2 ep2", "--engine", "pp2")
    sends, receives = report["trainer"]["bytes"], report["engine"]["bytes"]
    for side, sizes in (("source", sends), ("target", receives)):
        busiest = report["busiest"][side]
        assert sizes[str(busiest["rank"])] == busiest["bytes"] == max(sizes.values())
    # Staging holds live buffers, padded rows and all: at least what arrives, and two versions of it.
    staging = report["engine"]["staging_bytes"]
    assert all(staging[rank] >= receives[rank] for rank in receives)
    assert report["peak_staging_bytes"] == 2 * max(staging.values())
    assert report["expected"] is None and report["refused"] == []


def test_a_budget_for_staging_says_what_waits_where_and_what_does_not_fit() -> None:
    layouts = ("--model", "tiny-qwen3-moe", "--trainer", "pp2 ep2", "--engine", "pp2", "--hardware", "h200-nvlink")
    plain = as_json(*layouts)
    assert plain["staging"] is None
    full = as_json(*layouts, "--staging-device-bytes", str(1 << 40))
    assert full["expected"] == plain["expected"] and full["digest"] == plain["digest"]
    none = as_json(*layouts, "--staging-device-bytes", "0")
    whole = {rank: each["device_bytes"] for rank, each in full["staging"]["ranks"].items()}
    assert whole == {rank: each["host_bytes"] for rank, each in none["staging"]["ranks"].items()}
    stall = {each["finality"]: each["stall_s"] for each in none["expected"]["updates"] if each["gate"] == "version"}
    host_rate = PROFILES["h200-nvlink"].host_bytes_per_s.value
    assert stall["pipelined"] == pytest.approx(max(plain["engine"]["bytes"].values()) / host_rate)
    half = as_json(*layouts, "--staging-device-bytes", str(max(whole.values()) // 2), "--staging-sets", "1")
    for rank, each in half["staging"]["ranks"].items():
        assert each["device_bytes"] <= max(whole.values()) // 2 and each["short_bytes"] == 0
        assert each["device_bytes"] + each["host_bytes"] == whole[rank] // 2, "one set takes half of two"
    pulls = ("--staging-device-bytes", "1000", "--staging-host-bytes", "2000")
    words = " ".join(run(*layouts, *pulls).split())
    assert re.search(r"most staging of a rank in host memory 2 versions, \d", words)
    assert re.search(r"most that a rank pulls inside a commit [\d.]+ MiB", words)
    assert "pulled inside each commit: a trainer that is lost meanwhile poisons the engine" in words
    assert re.search(r"pulled engine rank 0: staging is \d+ bytes short: 2 sets .*; likewise 1 more ranks", words)
    assert "peak staging" not in words
    report = as_json(*layouts, "--staging-device-bytes", "0", "--staging-host-bytes", "0")
    assert {rank: 2 * each["pulled_bytes"] for rank, each in report["staging"]["ranks"].items()} == whole
    stall = {each["finality"]: each["stall_s"] for each in report["expected"]["updates"] if each["gate"] == "version"}
    lane_rate = PROFILES["h200-nvlink"].lane_bytes_per_s.value
    assert stall["pipelined"] == pytest.approx(max(plain["engine"]["bytes"].values()) / lane_rate)
    wrong = run(*layouts, "--staging-host-bytes", "-1", code=2)
    assert "staging.host_bytes must be a whole number of bytes" in wrong and wrong.count("\n") == 1


def test_what_is_not_streamed_is_named() -> None:
    plain = load_shape(config())
    assert refused(plain) == ()
    more = load_shape(config(num_nextn_predict_layers=2, quantization_config={"quant_method": "fp8"}))
    first, second = refused(more)
    assert first.tensors == "model.layers.{7..8}.*" and "num_nextn_predict_layers is 2" in first.why
    assert "quantization_config" in second.why and "float32" in second.why


def test_what_a_shipped_model_has_and_a_plan_does_not() -> None:
    """DeepSeek-V3: its prediction layer and the published fp8 scales; a plan of the bf16 rest is made all the same."""
    told = [each.tensors for each in refused(shape_of_model("DeepSeek-V3"))]
    assert told == ["model.layers.61.*", "*.weight_scale_inv, *_blocks, *_scales"]
    assert [each.tensors for each in refused(shape_of_model("GLM-4.5-Air"))] == ["model.layers.46.*"]


def types_of(shape: ModelShape) -> dict[str, tuple[str, str]]:
    return {each.tensors: (each.trainer, each.engine) for each in contract(family_of(shape), shape)}


def test_the_contract_names_every_kind_of_tensor_once() -> None:
    """DeepSeek-V3's config.json asks for fp8 in blocks; routers, their biases, norms and both ends are not."""
    found = types_of(shape_of_model("DeepSeek-V3"))
    fp8 = {name for name, (_, engine) in found.items() if engine == "fp8-block128"}
    assert fp8 == {name for name in found if LINEAR.search(name)} and len(fp8) == 5 + 3 * 3
    assert {found[name] for name in fp8} == {("bfloat16", "fp8-block128")}
    assert found.pop("model.layers.*.mlp.gate.e_score_correction_bias") == ("float32", "float32")
    plain = set(found) - fp8
    assert {found[name] for name in plain} == {("bfloat16", "bfloat16")}
    layer = {f"model.layers.*.{name}.weight" for name in ("mlp.gate", "input_layernorm", "post_attention_layernorm")}
    layer |= {f"model.layers.*.self_attn.{name}_a_layernorm.weight" for name in ("q", "kv")}
    assert plain == layer | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("said", [{"quant_method": "mxfp4"}, {"quant_method": "fp8"}, "fp8", None])
def test_other_ways_to_quantize_are_no_contract(said: object) -> None:
    assert set(types_of(load_shape(config(quantization_config=said))).values()) == {("float32", "float32")}


def test_the_contract_is_printed(tmp_path: Path) -> None:
    layouts = ("--trainer", "", "--engine", "")
    uniform = run("--model", "tiny-qwen3-moe", *layouts)
    assert re.search(r"^all tensors +bfloat16 +bfloat16$", uniform, re.MULTILINE)
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config(quantization_config=block)))
    text = run("--model", str(tmp_path), *layouts)
    assert re.search(r"^model\.layers\.\*\.self_attn\.q_proj\.weight +float32 +fp8-block128$", text, re.MULTILINE)
    assert re.search(r"^model\.layers\.\*\.mlp\.gate\.weight +float32 +float32$", text, re.MULTILINE)
    assert "refused *.weight_scale_inv" in text and "`megastream convert --dtype fp8-block128`" in " ".join(
        text.split()
    )
    types = as_json("--model", str(tmp_path), *layouts)["types"]
    assert {"tensors": "lm_head.weight", "trainer": "float32", "engine": "float32"} in types


@pytest.mark.parametrize(
    ("trainer", "engine", "groups"),
    [("pp2 ep2", "pp2", (4, 2)), ("tp2 etp1 pp2 ep8 dp8", "tp2 dp16 ep32", (2, 4))],
    ids=["few", "many"],
)
def test_the_map_is_one_file(tmp_path: Path, trainer: str, engine: str, groups: tuple[int, int]) -> None:
    """Ranks when they are few, stages and nodes when they are many; every byte of the plan is in a band's title."""
    path = tmp_path / "map.html"
    layouts = ("--model", "tiny-qwen3-moe", "--trainer", trainer, "--engine", engine)
    report = as_json(*layouts, "--html", str(path))
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page), "the file must not need a network"
    assert "prefers-color-scheme: dark" in page and report["digest"] in page
    assert [len(re.findall(rf'<g class="node {side}\d+ ', page)) for side in "st"] == list(groups)
    bands = re.findall(r'<path class="band s(\d+) t(\d+) ', page)
    assert len(bands) == len(set(bands)) and {int(s) for s, _ in bands} == set(range(groups[0]))
    ranks = report["trainer"]["ranks"] + report["engine"]["ranks"]
    assert len(re.findall(r"<tr><th>\d+</th>", page)) == ranks


def test_a_band_is_as_thick_as_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "map.html"
    report = as_json("--model", "tiny-qwen3-moe", "--trainer", "pp2", "--engine", "pp2", "--html", str(path))
    page = path.read_text(encoding="utf-8")
    links = {(link["source"], link["target"]): link["bytes"] for link in report["links"]}
    for source, target, top, bottom in re.findall(
        r'class="band s(\d+) t(\d+) c\d" d="M\d+,[\d.]+ C\S+ \S+ \d+,([\d.]+) V([\d.]+) ', page
    ):
        share = links[int(source), int(target)] / report["bytes"]
        assert float(bottom) - float(top) == pytest.approx(max(560 * share, 0.6), abs=0.11)


def test_a_map_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "map.html"
    told = run("--model", "tiny-qwen3-moe", "--trainer", "pp2", "--engine", "pp2", "--html", str(path), code=2)
    assert str(path) in told and told.count("\n") == 1
