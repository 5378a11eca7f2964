"""The benchmark of the finality policies: what of it holds on any machine. Its times are nobody's promise here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
POLICIES = ("whole", "pipelined", "speculative", "early", "aborting")
MOMENTS = ("first", "half", "all")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("bench_finality_figures")


def test_the_interval_is_that_of_so_many_pairs(bench: Any) -> None:
    """Tabled quantiles."""
    for freedom, tabled in ((9, 2.2622), (19, 2.0930), (29, 2.0452), (59, 2.0010), (1000, 1.9623)):
        assert bench.student_t(freedom) == pytest.approx(tabled, abs=1e-3)


def test_verdicts(bench: Any) -> None:
    def said(mean: float, ci: float, pairs: int = 30, invalid: int = 0, again: float = 0.5) -> str:
        row, stock = {"invalid_steps": invalid, "steps": 60}, dict(mean=0.0, ci=again, pairs=pairs)
        return str(bench.verdict(row, dict(mean=mean, ci=ci, pairs=pairs), stock, [])["cost"])

    assert said(1.0, 1.9) == "holds"
    assert said(1.0, 2.1) == "open"
    assert said(5.0, 1.9) == "fails"
    assert said(5.0, 1.9, again=8.0) == "holds", "stock differs from stock by more"
    assert said(1.0, 1.9, pairs=29) == "few"
    assert said(1.0, 1.9, invalid=1) == said(1.0, 1.9, pairs=5, invalid=1) == "invalid"


def spread(middle: float, width: float) -> list[float]:
    return [middle + width * (step - 29.5) / 59 for step in range(60)]


def rows_of(**middles: float) -> dict[str, Any]:
    """Rows in which all moments of a policy lie around one figure, a tenth of a percent apart at most."""
    return {name: {"percent": dict.fromkeys(MOMENTS, spread(middle, 0.1))} for name, middle in middles.items()}


def test_verdicts_on_when_bytes_leave(bench: Any) -> None:
    def said(name: str, rows: dict[str, Any], pairs: int = 30, invalid: int = 0) -> str:
        row, free = {"invalid_steps": invalid, "steps": 60}, dict(mean=0.0, ci=0.1, pairs=pairs)
        found = bench.verdict(row, free, free, bench.not_above_0(name, rows))
        assert found["cost"] == found["bytes"] or found["cost"] == "holds"
        return str(found["bytes"])

    in_time, late = rows_of(whole=6.0, early=-4.0, pipelined=5.0), rows_of(whole=6.0, early=1.0, pipelined=7.0)
    assert [said(name, in_time) for name in in_time] == ["-", "holds", "holds"]
    assert [said(name, late) for name in late] == ["-", "fails", "fails"]
    assert said("pipelined", rows_of(pipelined=7.0)) == "-", "nothing in the run to compare it to"
    assert said("early+slice", {"early+slice": late["early"]}) == "fails"
    assert said("early", in_time, pairs=29) == "few" and said("early", in_time, invalid=1) == "invalid"
    one_late = rows_of(whole=6.0, pipelined=5.0)
    one_late["pipelined"]["percent"]["all"] = spread(7.0, 0.1)
    assert said("pipelined", one_late) == "fails", "each of the three moments counts"
    assert said("early", {"early": {"percent": {"half": spread(-0.5, 10.0)}}}) == "open"


def test_the_interval_of_a_median_is_the_tabled_one(bench: Any) -> None:
    """The two ranks of the sign test at 95 %."""
    for count, tabled in ((3, (1, 3)), (6, (1, 6)), (20, (6, 15)), (30, (10, 21)), (60, (22, 39)), (100, (40, 61))):
        values = [float(rank) for rank in range(count, 0, -1)]
        assert bench.median_interval(values) == tabled


def steps(attempt: int, sizes: tuple[int, ...] = (2, 2)) -> list[dict[str, Any]]:
    sent = [(1.0 + at, "unit", size) for at, size in enumerate(sizes)]
    return [dict(begin=0.0, backward_end=1.0, end=2.0, slot_wait_s=0.0, version=1, attempt=attempt, sent=sent)]


@pytest.mark.parametrize(
    ("name", "attempt", "sizes", "invalid"),
    [
        ("early", 0, (2, 2), 0),
        ("early", 0, (2, 1), 1),
        ("speculative", 1, (2, 2), 1),
        ("aborting", 1, (2, 2), 0),
        ("aborting", 0, (2, 2), 1),
    ],
)
def test_a_step_that_is_not_what_its_row_says_makes_the_row_invalid(
    bench: Any, name: str, attempt: int, sizes: tuple[int, ...], invalid: int
) -> None:
    seen = {
        "steps": steps(attempt, sizes),
        "plan_bytes": 4,
        "plan_pieces": 2,
        "unit_bytes": {"unit": 4},
        "aborts": attempt,
    }
    assert bench.timeline(name, [{"seen": {name: seen}}])["invalid_steps"] == invalid


def compared(bench: Any, last: float, block: float, **of_slice: Any) -> dict[str, Any]:
    """`pipelined+slice`: its last byte leaves `last` % of a step later, and its blocks take about `block` % longer."""
    rows = rows_of(**{"pipelined": 5.0, "pipelined+slice": 5.0 + last})
    for row in rows.values():
        row.update(invalid_steps=0, plan_bytes=8, plan_pieces=2)
    rows["pipelined+slice"].update(of_slice)
    times = [1.0 + pair / 100 for pair in range(12)]
    slower = [time * (1 + (block + pair % 2) / 100) for pair, time in enumerate(times)]
    found: dict[str, Any] = bench.sliced(
        "pipelined+slice", rows, [{"blocks": {"pipelined": times, "pipelined+slice": slower}}]
    )
    return found


def test_slices_are_better_when_they_gain_somewhere_and_lose_nowhere(bench: Any) -> None:
    assert compared(bench, -1.0, -0.5)["better"] == "slice", "earlier; blocks by 0 % +- 0.33 %"
    assert compared(bench, -1.0, -3.0)["better"] == compared(bench, 0.0, -3.0)["better"] == "slice"
    assert compared(bench, 1.0, -0.5)["better"] == compared(bench, 0.0, 3.0)["better"] == "replica"
    assert compared(bench, -1.0, 3.0)["better"] == "open", "earlier, but dearer"
    assert compared(bench, 0.0, -0.5)["better"] == "open"
    assert compared(bench, -1.0, -0.5, invalid_steps=1)["better"] == "invalid"
    assert compared(bench, -1.0, -0.5, plan_bytes=9)["better"] == "invalid", "not the same bytes"
    found = compared(bench, -1.0, -0.5, plan_pieces=3)
    assert found["all"] == pytest.approx([-1.0] * 3) and found["pieces"] == (3, 2)
    assert found["block"] == {"mean": 0.0, "ci": pytest.approx(0.33, abs=0.01), "pairs": 12}


@pytest.mark.full
def test_a_few_pairs_of_every_policy_send_what_the_plan_says(tmp_path: Path) -> None:
    """Two stages; every measured step of `aborting` is taken back, none of the others."""
    out, pairs = tmp_path / "figures.json", 2
    size = ["--pp", "2", "--microbatches", "2", "--layers", "2", "--hidden", "64", "--bucket", "50000"]
    command = [sys.executable, "tools/bench_finality.py", *size, "--pairs", str(pairs), "--json", str(out)]
    done = subprocess.run(
        [*command, "--policies", *POLICIES], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "a verdict needs 30" in done.stdout
    figures = json.loads(out.read_text())
    assert figures["verdict"] == dict.fromkeys(POLICIES, {"cost": "few", "bytes": "few"})
    for name, row in figures["timeline"].items():
        assert (row["steps"], row["invalid_steps"]) == (2 * pairs, 0), name
        assert {key: len(values) for key, values in row["percent"].items()} == dict.fromkeys(MOMENTS, 2 * pairs), name
        assert (row["aborts"] >= row["steps"]) == (name == "aborting"), name
    memory = figures["memory"]
    assert memory["speculative"]["kept"] == pytest.approx(3.0, abs=0.01)
    for name in ("early", "pipelined"):
        assert memory[name]["extra"] <= 2 * memory[name]["bucket"], (name, memory[name])


@pytest.mark.full
@pytest.mark.parametrize("lanes", ["count", "gloo"])
def test_slices_are_compared_with_replicas_of_the_same_run(tmp_path: Path, lanes: str) -> None:
    """Two replicas; over gloo every piece is acknowledged by a process that checked it."""
    out, policies = tmp_path / "figures.json", ["pipelined", "pipelined+slice"]
    size = ["--pp", "1", "--dp", "2", "--microbatches", "1", "--layers", "2", "--hidden", "64", "--bucket", "50000"]
    command = [sys.executable, "tools/bench_finality.py", *size, "--pairs", "2", "--json", str(out), "--lanes", lanes]
    done = subprocess.run(
        [*command, "--policies", *policies], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "pipelined+slice against the same without: first " in done.stdout
    figures = json.loads(out.read_text())
    assert {name: row["invalid_steps"] for name, row in figures["timeline"].items()} == dict.fromkeys(policies, 0)
    (found,) = figures["slices"].values()
    assert found["better"] in ("slice", "replica", "open") and min(found["pieces"]) > 0
