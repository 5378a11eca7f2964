"""The swap experiment without an engine: its configuration, its figures by hand-made answers, its files."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megastream.protocol.part_records import PartCommitted, RankCommit
from megastream.protocol.records import Committed
from megastream.rl.plain import read_plain
from megastream.rl.sections import ConfigError
from megastream.rl.swap_config import Case, SwapConfig, cases_of, load_swap_config, parse_swap_config
from megastream.rl.swap_figures import Answer, Measured, figures, lives_of
from megastream.rl.swap_launch import run_swap
from megastream.rl.swap_replay import recorded
from megastream.rl.swap_report import CHARTS, as_csv, line, page
from megastream.rl.swap_sender import check_models, choose_experts
from tests.helpers.swapped import write
from tests.helpers.synthetic import SHAPE

ROOT = Path(__file__).parents[2]
FILE = ROOT / "configs/swap.yaml"


def raw(**changes: Any) -> dict[str, Any]:
    """The shipped file as plain data; `section__key` is changed."""
    data: dict[str, Any] = read_plain(FILE)
    if "replay" in changes:
        del data["traffic"]
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data[section][name] = value
        else:
            data[section] = value
    return data


def test_the_shipped_file_is_good_and_its_cases_are_all_combinations() -> None:
    config = load_swap_config(FILE)
    assert [*cases_of(config, 0)] == [Case(r, s) for r in (1, 4) for s in (0.0, 2.0)]
    assert len([*cases_of(config, 16)]) == 2 * 2 * 2
    assert str(next(cases_of(config, 16))) == "1 at a time, skew 0, 16 experts of each layer by gate version"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swap__swaps": 5}, "swap.swaps is 5; an even number"),
        ({"swap__gates": ["stage"]}, "swap.gates"),
        ({"swap__gates": []}, "swap.gates is .*; give at least one value"),
        ({"swap__experts": [1, 1]}, r"swap.experts is \[1, 1\]; give .* each once"),
        ({"swap__experts": [0]}, "swap.experts has 0; each must be from 1 to 4096"),
        ({"traffic__skew": [float("nan")]}, "traffic.skew has nan"),
        ({"traffic__requests": [-1]}, "traffic.requests has -1"),
        ({"traffic__answer_tokens": 300}, "engine.max_model_len = 256 needs at least one more"),
        ({"traffic__skewed": 1}, "unknown key traffic.skewed; the nearest known key is traffic.skew"),
        ({"swap__emission_s": -1.0}, "swap.emission_s is -1"),
        ({"traffic": None}, "give one of the sections traffic and replay"),
        ({"replay": {"file": "f"}, "traffic": read_plain(FILE)["traffic"]}, "give one of the sections"),
        ({"replay": {"file": "f", "speed": [0.0]}}, "replay.speed has 0"),
        ({"deadlines__case_s": 0}, "deadlines.case_s is 0"),
        (
            {"traffic__skew": [float(n) for n in range(99)], "traffic__requests": [*range(1, 12)]},
            "at most 1000 are run",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_swap_config(raw(**changes))


LINES = [
    {"at_s": 0.5, "prompt": "3 + 4", "answer_tokens": 500},
    {"at_s": 0, "prompt": [7, 8], "answer_tokens": 200},
]


def replay(path: Path, *lines: Any, **changes: Any) -> SwapConfig:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return parse_swap_config(raw(replay={"file": str(path), "speed": [1.0, 4.0]}, **changes))


def test_a_replay_asks_what_its_file_has_at_every_speed(tmp_path: Path) -> None:
    config = replay(tmp_path / "f", *LINES)
    first, second = recorded(config, 320)
    assert (first.at_s, first.prompt, second.prompt, second.answer_tokens) == (0.5, "3 + 4", (7, 8), 200)
    assert [*cases_of(config, 0)] == [Case(speed=1.0), Case(speed=4.0)]
    gates = ["version", "idle_experts"]
    assert [*cases_of(config, 16)] == [Case(speed=v, experts=16, gate=gate) for v in (1.0, 4.0) for gate in gates]
    assert str(Case(speed=0.5)) == "replay at speed 0.5, nothing swapped"
    assert recorded(parse_swap_config(raw()), 320) == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([LINES[0], "{"], "f, line 2: Input data was truncated"),
        ([LINES[0], "", LINES[1]], "f, line 2: Input data was truncated"),
        ([{**LINES[0], "tokens": 3}], "f, line 1: Object contains unknown field `tokens`"),
        ([{**LINES[0], "at_s": -1}], "f, line 1: Expected `float` >= 0.0 - at `\\$.at_s`"),
        ([{**LINES[0], "prompt": []}], "f, line 1: Expected `array` of length >= 1"),
        ([{**LINES[0], "prompt": [7, 320]}], "f, line 1: token 320; the model has 320, from 0 on"),
        ([{**LINES[1], "answer_tokens": 254}], "prompt and answer are 256 tokens; engine.max_model_len = 256 needs"),
        (LINES[1:], r"f asks for 200 tokens, and \(swap.swaps \+ 1\) x swap.tokens_between are 700"),
    ],
)
def test_a_replay_that_does_not_fit_is_refused_by_its_line(lines: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        recorded(replay(tmp_path / "f", *lines), 320)


def test_a_replay_without_its_file_names_it(tmp_path: Path) -> None:
    config = replay(tmp_path / "f")
    (tmp_path / "f").unlink()
    with pytest.raises(ValueError, match="replay.file .*f cannot be read: No such file"):
        recorded(config, 320)


def test_experts_are_chosen_alike_in_every_run_and_models_that_do_not_fit_are_named(tmp_path: Path) -> None:
    chosen = choose_experts(SHAPE, 2, 7)
    assert chosen == choose_experts(SHAPE, 2, 7) != choose_experts(SHAPE, 2, 8)
    assert len(set(chosen)) == 2 * SHAPE.num_layers
    one, other = write(tmp_path / "a"), write(tmp_path / "b", moe_intermediate_size=32)
    assert check_models({"model": one, "other": one}, (1, 6), 0).num_experts == 6
    with pytest.raises(ValueError, match="swap.experts has 7; a layer of this model has 6"):
        check_models({"model": one, "other": one}, (7,), 0)
    with pytest.raises(ValueError, match="experts of different shapes"):
        check_models({"model": one, "other": other}, (1,), 0)
    with pytest.raises(ValueError, match="is no Hugging Face checkpoint"):
        check_models({"model": one, "other": tmp_path}, (1,), 0)


REPLIES = (RankCommit(0, True, 0.002, 1), RankCommit(1, True, 0.003, 1))
NAME: dict[str, Any] = {"attachment": "i1", "incarnation": 1, "ranks": REPLIES}
PART = PartCommitted(**NAME, version=2, units=("u",), label="1..2+1", visible_unix_s=10.0)
RECORDS = (
    PART,
    Committed(**NAME, version=2, visible_unix_s=10.5),
    Committed(**NAME, version=3, visible_unix_s=11.0),
)
ANSWERS = (
    Answer([5], (7, 7, 7), (-1.0, -2.0, -3.0), (0.0, 1.0, 1.5, 3.5), ("1", "1..2+1", "2")),
    Answer([5], (8,), (-4.0,), (0.0, 0.25), ("3",)),
)
RUN = Measured(
    case=Case(2, 1.0, experts=4, gate="idle_experts"),
    answers=ANSWERS,
    seconds=2.0,
    records=RECORDS,
    unit_bytes={"u": 30, "v": 70},
    contents={1: "model", 2: "other", 3: "model"},
    rescored={"model": [(-1.25, -2.5, -9.0), (-4.0,)], "other": [(-9.0, -9.0, -3.5), (-9.0,)]},
)


def test_figures_of_a_case_are_what_its_answers_and_records_say() -> None:
    row = figures(RUN)
    assert (row["requests"], row["skew"], row["experts"], row["gate"]) == (2, 1.0, 4, "idle_experts")
    assert (row["swaps"], row["tokens"], row["tokens_per_s"], row["in_flight"]) == (2, 4, 2.0, 1.88)
    assert (row["version_bytes"], row["units"]) == (100, 2)
    assert row["early_bytes_share"] == 0.15, "30 of 100 bytes of one version, none of the other"
    assert (row["early_ms"], row["stall_ms"], row["calls_per_swap"]) == (500.0, 4.5, 1.5)
    assert row["mixed_token_share"] == 0.25
    assert (row["longest_gap_ms"], row["median_step_ms"]) == (2000.0, 1250.0), "the wait for the first output counts"
    # |-1 + 1.25|, the mix against its oldest version |-2 + 2.5|, |-3 + 3.5|, |-4 + 4|
    assert (row["drift_mean"], row["drift_max"], row["mixed_drift_mean"]) == (0.3125, 0.5, 0.5)


def test_a_mix_that_is_taken_for_its_newest_version_shows_in_the_drift() -> None:
    wrong = figures(replace(RUN, contents={1: "other", 2: "other", 3: "model"}))
    assert wrong["drift_max"] == 8.0


def test_a_case_without_swaps_has_no_figures_of_swaps() -> None:
    row = figures(
        replace(RUN, case=Case(1, 0.0), answers=ANSWERS[1:], records=(), unit_bytes={}, rescored={"model": [(-4.5,)]})
    )
    assert [row[key] for key in ("early_bytes_share", "early_ms", "stall_ms", "mixed_drift_mean")] == [None] * 4
    assert (row["swaps"], row["drift_mean"], row["mixed_token_share"]) == (0, 0.5, 0.0)
    assert line(row) == "1 at a time, skew 0, nothing swapped: longest gap 250 ms, drift 0.5000"


def test_a_version_that_is_overtaken_counts_for_nothing() -> None:
    lives = lives_of([PART, Committed(**NAME, version=4, visible_unix_s=12.0)], RUN.unit_bytes)
    assert [(live.early_bytes, live.calls) for live in lives] == [(0, 1)]


def test_the_files_hold_every_case() -> None:
    rows = [
        figures(RUN),
        figures(
            replace(RUN, case=Case(1, 0.0), records=(), unit_bytes={}, answers=ANSWERS[1:], rescored={"model": [(-4,)]})
        ),
    ]
    table = [*csv.DictReader(io.StringIO(as_csv(rows)))]
    assert [row["gate"] for row in table] == ["idle_experts", "none"] and table[1]["stall_ms"] == ""
    shown = page(load_swap_config(FILE), rows)
    assert shown.count("<svg") == len(CHARTS) and shown.count("<tr>") == 3
    assert "runs/quickstart/exported" in shown and "30%" not in shown and "15.0%" in shown


def test_a_start_without_its_models_leaves_the_last_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "job.json").write_text('{"run_id": "x", "engine": "e", "control_url": "u", "config": {"swap": {}}}')
    (out / "swap.json").write_text("{}")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw(model=str(tmp_path / "nothing"))))
    assert run_swap(tmp_path / "c.yaml", out) == 1
    assert "nothing is no Hugging Face checkpoint: config.json: No such file" in capsys.readouterr().err
    assert {path.name: path.stat().st_size for path in out.iterdir()}.keys() == {"job.json", "swap.json"}


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (None, "is not empty and holds no results of a run"),
        ({"run_id": "x", "engine": "e", "control_url": "u", "config": {"run": {}}}, "the results of another command"),
    ],
)
def test_the_results_of_others_are_left_alone(
    job: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("x")
    if job is not None:
        (tmp_path / "job.json").write_text(json.dumps(job))
    assert run_swap(FILE, tmp_path) == 1
    assert words in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"mine", *(["job.json"] if job else [])}
