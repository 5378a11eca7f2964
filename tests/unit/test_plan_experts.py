"""`megastream plan` with experts in turns, or by a map; refused where vLLM would not have them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megastream.cli.main import app
from tests.helpers.reference_families import REFERENCES

SLOTS = [3, 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 3, 3]
"""14 slots for 12 experts: on two ranks one of them once on the first, twice on the second."""
EXPERT_BYTES = 3 * 48 * 20 * 4


def invoke(tmp_path: Path, *options: str, family: str = "qwen3_moe", engine: str = "tp2 ep2", **changes: Any) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(REFERENCES[family].config(**changes)))
    sides = ("--trainer", "pp2(4,3)", "--engine", engine)
    return CliRunner().invoke(app, ["plan", "--model", str(tmp_path), *sides, *options])


def plan(tmp_path: Path, *options: str, **how: Any) -> dict[str, Any]:
    result = invoke(tmp_path, *options, "--json", **how)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def refused(tmp_path: Path, *options: str, **how: Any) -> str:
    """The line with which the command refuses."""
    result = invoke(tmp_path, *options, **how)
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, result.exception or result.output
    assert len(result.output.splitlines()) == 1
    return result.output


def write(tmp_path: Path, content: Any) -> tuple[str, str]:
    path = tmp_path / "map.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return "--expert-map", str(path)


def test_every_slot_gets_its_expert_s_bytes(tmp_path: Path) -> None:
    """Two redundant experts in each of 7 layers are two experts' bytes more, and still nothing above the floor."""
    plain = plan(tmp_path)
    for given in (SLOTS, [SLOTS] * 7, [SLOTS[layer:] + SLOTS[:layer] for layer in range(7)]):
        report = plan(tmp_path, *write(tmp_path, given), "--html", str(tmp_path / "map.html"))
        assert report["bytes"] - plain["bytes"] == 2 * 7 * EXPERT_BYTES
        assert report["bytes"] == report["bytes_floor"] == sum(report["engine"]["bytes"].values())
        assert report["engine"]["experts"] == {"placement": "map", "slots": 14, "all2all_backends": None}
        assert report["digest"] != plain["digest"]
        for rank, num in report["engine"]["bytes"].items():
            assert num - plain["engine"]["bytes"][rank] == 7 * EXPERT_BYTES
        staged = report["engine"]["staging_bytes"]["0"] - plain["engine"]["staging_bytes"]["0"]
        assert staged == 7 * EXPERT_BYTES
        assert "2 ranks, 14 slots for 12 experts" in (tmp_path / "map.html").read_text(encoding="utf-8")
        assert "2 ranks, 14 slots for 12 experts" in invoke(tmp_path, "--expert-map", str(tmp_path / "map.json")).output
    assert plain["engine"]["experts"] == {"placement": "linear", "slots": 12, "all2all_backends": None}


def test_rows_are_of_layers_with_experts(tmp_path: Path) -> None:
    """GLM-4.5-MoE: the first two of 7 layers are dense, and have no row."""
    slots = [*range(12), 0, 1]
    report = plan(tmp_path, *write(tmp_path, [slots] * 5), family="glm4_moe")
    assert report["bytes"] - plan(tmp_path, family="glm4_moe")["bytes"] == 2 * 5 * EXPERT_BYTES
    told = refused(tmp_path, *write(tmp_path, [slots] * 7), family="glm4_moe")
    assert "7 rows, and the model has 5 layers with experts" in told
    told = refused(tmp_path, *write(tmp_path, [*[slots] * 4, [*slots[:13], 12]]), family="glm4_moe")
    assert "layer 6, slot 13 holds 12; the model has experts 0 to 11" in told


ROW = list(range(12))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (ROW[:-1] + [0], "layer 0: expert 11 has no slot among 12; each needs one"),
        ([*[ROW] * 3, [0] * 12, *[ROW] * 3], "layer 3: expert 1 has no slot among 12, nor have 10 others"),
        ([*ROW[:5], 12, *ROW[6:]], "layer 0, slot 5 holds 12; the model has experts 0 to 11"),
        ([*[ROW] * 6, [*ROW[:11], -1]], "layer 6, slot 11 holds -1"),
        ([*ROW[:5], 5.0, *ROW[6:]], "slot 5 holds 5.0"),
        ([True, *ROW], "slot 0 holds True"),
        ([*ROW, "x" * 5000], "slot 12 holds 'xxxx"),
        ([*ROW, 3], "layer 0 has 13 slots, which do not divide by ep=2"),
        ([ROW] * 6, "6 rows, and the model has 7 layers with experts; give a row for each, or one list for all"),
        ([*[ROW] * 6, [*ROW, 0, 1]], "layer 6 has 14 slots, layer 0 has 12; all need as many"),
        ([ROW, *ROW], "row 1 is 0; expected a list of experts, like the other rows"),
        ([], "expected a list of experts, or one for each layer with experts"),
        ([[]] * 7, "layer 0: expert 0 has no slot among 0"),
        ({"map": ROW}, "expected a list of experts"),
        ([*ROW * 1400], "layer 0 has 16800 slots; it has at most 16384"),
        (b"[0, 1", "is no JSON file"),
        (b"\xff\xfe", "is no JSON file"),
        (b"[" * 100_000, "is no JSON file"),
        (b"[" + b"9" * 5000 + b"]", "is no JSON file"),
    ],
)
def test_maps_that_cannot_be(tmp_path: Path, content: Any, words: str) -> None:
    told = refused(tmp_path, *write(tmp_path, content))
    assert words in told and str(tmp_path / "map.json") in told and len(told) < 500


def test_a_map_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert "nowhere.json" in refused(tmp_path, "--expert-map", str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"family": "qwen2_moe"}, "vLLM's qwen2_moe has each expert once, if any; leave --expert-map out"),
        ({"family": "gpt_oss"}, "vLLM's gpt_oss has each expert once"),
        ({"family": "llama", "engine": "tp2"}, "vLLM's llama has each expert once, if any"),
        (
            {"engine": "tp2"},
            "engine layout tp2 has no expert parallelism, without which vLLM has each expert once; write",
        ),
        ({"engine": "pp2"}, "take more ranks, or leave --expert-map out"),
        ({"family": "glm4_moe", "engine": "tp2 ep2 round_robin", "n_group": 2}, "with a map vLLM has no round_robin"),
    ],
)
def test_engines_that_have_no_map(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    assert words in refused(tmp_path, *write(tmp_path, SLOTS), **how)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_experts_in_turns(tmp_path: Path, family: str) -> None:
    how = {"family": family, "n_group": 4}
    linear, turns = plan(tmp_path, **how), plan(tmp_path, engine="tp2 ep2 round_robin", **how)
    assert turns["engine"]["layout"] == "tp2 etp1 ep2 round_robin" and turns["digest"] != linear["digest"]
    assert turns["engine"]["experts"] == {"placement": "round_robin", "slots": 12, "all2all_backends": None}
    assert turns["bytes"] == turns["bytes_floor"] == linear["bytes"]
    replicas = plan(tmp_path, engine="dp2 ep2 round_robin", **how)
    assert replicas["engine"]["experts"]["all2all_backends"] == ["deepep_low_latency", "nixl_ep"]
    told = " ".join(invoke(tmp_path, engine="dp2 ep2 round_robin", **how).output.split())
    assert "round_robin, 2 ranks, only with --all2all-backend deepep_low_latency or nixl_ep" in told


@pytest.mark.parametrize(
    ("family", "groups", "words"),
    [
        ("qwen3_moe", None, "where they are in several groups, and qwen3_moe has none; leave round_robin out"),
        ("qwen3_moe", 4, "qwen3_moe has none"),
        ("glm4_moe", None, "glm4_moe has one (n_group is 1)"),
        ("deepseek_v3", 1, "deepseek_v3 has one (n_group is 1)"),
        ("deepseek_v3", "8", "config.json field n_group is '8'; expected a whole number"),
    ],
)
def test_turns_that_vllm_would_not_keep(tmp_path: Path, family: str, groups: Any, words: str) -> None:
    changes = {} if groups is None else {"n_group": groups}
    assert words in refused(tmp_path, family=family, engine="tp2 ep2 round_robin", **changes)
