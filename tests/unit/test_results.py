"""What a run's files must hold: a missing line is an error, a wrong figure fails the run, a skipped step does not."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from megastream.rl import summary
from megastream.rl.config import load
from megastream.rl.job import Job, Pass
from megastream.rl.results import Files, SummaryError, compare_passes
from tests.helpers.small_run import write_config

NAMES = {"stock": 4, "stream": 4, "stream-checked": 2, "whole": 4, "whole-checked": 2}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """The lines of an orderly run of two trainer ranks."""
    config = load(
        write_config(tmp_path, trainer__ranks=2, trainer__ep=1, run__checked_updates=2, run__checked_tokens=4)
    )
    job = Job(run_id="r", engine="e", control_url="u", run_folder=str(tmp_path), temp_folder="t", config=config)
    trainer: list[dict[str, Any]] = []
    for name, updates in NAMES.items():
        for rank in range(2):
            trainer += [step(name, rank, index) for index in range(updates)]
            trainer.append({"kind": "final", "name": name, "rank": rank, "digest": f"{rank}/{updates}"})
        trainer.append({"kind": "begin", "name": name, "unix_s": 0.0, "base": 0})
        trainer.append({"kind": "end", "name": name, "unix_s": 99.0, "last": updates})
    checks = [
        {"kind": "check", "name": name, "version": version, "tensors": 3, "differing": []}
        for name in ("stream-checked", "whole-checked")
        for version in (1, 2)
    ]
    times = [10.0, 10.5, 11.0, 11.5, 12.0]
    answers = [
        {"request": "q0", "tokens": 5, "spans": [["1", 0, 5]], "asked_unix_s": 2.0, "times": times, "counts": [1] * 5}
    ]
    records = {
        "batches": [[n, "1", {"q0": 1}] for n in range(5)],
        "ranks": [[[n, "1"] for n in range(5)]] * 2,
        "commits": [[[str(version), rank / 100, None] for version in (1, 2, 3, 4)] for rank in (1, 2)],
    }
    engine = [{"kind": "engine", "bytes_floor": 10}, *checks]
    return Files(job, trainer, engine, answers, [live("stream", version) for version in (1, 2, 3, 4)], records)


def step(name: str, rank: int, index: int) -> dict[str, Any]:
    return {
        "kind": "step",
        "name": name,
        "rank": rank,
        "step": index,
        "version": index + 1 if name != "stock" else -1,
        "loss": 2.0 - index if rank == 1 else None,
        "grad_norm": 0.5,
        "step_ms": 1.0,
        "final_unix_s": 1.0,
    }


def live(name: str, version: int) -> dict[str, Any]:
    line = {"pass": name, "version": version, "train_step": version, "units": 1, "wire_bytes": 10, "wasted_bytes": 0}
    return {**line, "stall_ms": 1.0, "visible_unix_s": 2.0}


def line_of(files: Files, **wanted: Any) -> dict[str, Any]:
    return next(line for line in files.trainer if wanted.items() <= line.items())


def test_an_orderly_run_passes(files: Files) -> None:
    compare_passes(files)


@pytest.mark.parametrize(
    ("wanted", "change", "words"),
    [
        ({"kind": "step", "name": "whole-checked", "step": 1}, None, "step 1 of pass whole-checked"),
        ({"kind": "step", "name": "stock", "step": 3, "rank": 1}, None, "step 3 of pass stock"),
        ({"kind": "final", "name": "stock", "rank": 0}, None, "final digests of ranks"),
        ({"kind": "final", "name": "stream-checked", "rank": 1}, None, "final digests of ranks"),
        ({"kind": "final", "name": "whole", "rank": 1}, {"digest": "x"}, "end with different parameters"),
        ({"kind": "final", "name": "whole-checked", "rank": 1}, {"digest": "x"}, "end with different parameters"),
        ({"kind": "step", "name": "whole-checked", "step": 1}, {"grad_norm": 0.6}, "step 1 on rank 0 differs"),
    ],
)
def test_what_is_missing_or_differs_is_an_error(
    files: Files, wanted: dict[str, Any], change: dict[str, Any] | None, words: str
) -> None:
    line = line_of(files, **wanted)
    if change is None:
        files.trainer.remove(line)
    else:
        line.update(change)
    with pytest.raises(SummaryError, match=words):
        compare_passes(files)


def test_a_line_given_twice_and_no_lines_at_all_are_errors(files: Files) -> None:
    doubled = deepcopy(files)
    doubled.trainer.append(line_of(files, kind="final", name="stock", rank=0))
    empty = Files(files.job, [], [], [], [], {})
    for broken in (doubled, empty):
        with pytest.raises(SummaryError):
            compare_passes(broken)
    with pytest.raises(SummaryError, match="kind engine"):
        empty.description()


def stream_figures(files: Files) -> dict[str, Any]:
    return summary.mode_figures(files, Pass("stream", "stream", 4, False), Pass("stream-checked", "stream", 2, True))


def test_skipped_and_overtaken_versions_are_counted(files: Files) -> None:
    figures = stream_figures(files)
    assert (figures["updates"], figures["skipped_steps"], figures["overtaken"]) == (4, 0, 0)
    for line in files.trainer:
        if line["kind"] == "step" and line["name"] == "stream" and line["step"] == 1:
            line["version"] = -1
    files.versions = [live("stream", 3), live("stream", 4)]
    figures = stream_figures(files)
    assert (figures["updates"], figures["skipped_steps"], figures["overtaken"]) == (2, 1, 1)


@pytest.mark.parametrize("versions", [[], [1, 2, 3], [1, 2, 3, 4, 9]])
def test_versions_that_nobody_made_or_that_never_came_are_errors(files: Files, versions: list[int]) -> None:
    files.versions = [live("stream", version) for version in versions]
    with pytest.raises(SummaryError, match="became live"):
        stream_figures(files)


def test_a_stall_that_nobody_measured_is_not_zero(files: Files) -> None:
    del files.records["commits"][1][0]
    with pytest.raises(SummaryError, match=r"no commit of version 1 on engine ranks \[1\]"):
        stream_figures(files)


def test_a_stall_is_the_slowest_ranks_and_counts_what_a_gpu_does_behind_the_call(files: Files) -> None:
    assert stream_figures(files)["update_stall_ms"] == 20.0
    files.records["commits"][0] = [[str(version), 0.01, 0.5] for version in (1, 2, 3, 4)]
    assert stream_figures(files)["update_stall_ms"] == 500.0


def test_checks_and_tokens_must_be_as_many_as_configured(files: Files) -> None:
    few = deepcopy(files)
    few.engine = [line for line in few.engine if line.get("version") != 2]
    with pytest.raises(SummaryError, match="were compared"):
        stream_figures(few)
    files.records["ranks"] = [[[n, "7"] for n in range(5)]] * 2
    files.answers[0]["spans"] = [["7", 0, 5]]
    with pytest.raises(SummaryError, match="0 tokens were checked"):
        stream_figures(files)


def test_no_answers_are_an_error(files: Files) -> None:
    files.answers.clear()
    with pytest.raises(SummaryError, match="no token"):
        stream_figures(files)


def test_the_wait_for_a_first_token_counts_as_a_gap(files: Files) -> None:
    figures = stream_figures(files)
    assert figures["longest_gap_ms"] == figures["longest_gap_without_updates_ms"] == 8000.0
    assert figures["median_step_ms"] == 500.0


def test_wrong_figures_fail_by_name() -> None:
    good = dict.fromkeys(summary.MUST_BE_ZERO, 0)
    summary.refuse_wrong({"stream": good, "whole": good})
    for name in summary.MUST_BE_ZERO:
        with pytest.raises(SummaryError, match=f"whole.{name} = 2"):
            summary.refuse_wrong({"stream": good, "whole": {**good, name: 2}})


def test_absent_libraries_are_none() -> None:
    assert summary._installed("torch") and summary._installed("no-such-library-anywhere") is None
