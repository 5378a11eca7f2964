"""A run deletes only what a run wrote, only in a folder of a run, and only once it really starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastream.rl import owned
from megastream.rl.folder import JOB_FILE, REFUSED_LOG, forget_results, refuse_foreign, take_over
from megastream.rl.launch import refuse_unfit, run_quickstart
from tests.helpers.small_run import write_config

OURS = {"run_id": "r", "engine": "e", "control_url": "u", "config": {}}
WRITTEN = ("summary.json", "records.json", "train.jsonl", "trainer-11.jsonl", "trainer-0.log", "host.log")
THEIRS = ("notes.json", "trainer-x.log", "data.jsonl", "mine.log")


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")


@pytest.mark.parametrize("job", [None, "{}", "[1]", "not json"])
def test_folder_of_somebody_else_is_refused_and_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], job: str | None
) -> None:
    out = tmp_path / "out"
    fill(out, *WRITTEN, *THEIRS, "checkpoint/model.safetensors")
    if job is not None:
        (out / JOB_FILE).write_text(job)
    before = files_in(out)
    assert run_quickstart(write_config(tmp_path), out, redis_url=None, engine_layout=None) == 1
    assert "--out" in capsys.readouterr().err
    assert files_in(out) == before


def test_only_names_of_a_run_are_forgotten(tmp_path: Path) -> None:
    fill(tmp_path, *WRITTEN, *THEIRS, "checkpoint/model.safetensors", "checkpoint/mine.txt", "exported/config.json")
    (tmp_path / JOB_FILE).write_text(json.dumps(OURS))
    refuse_foreign(tmp_path)
    forget_results(tmp_path)
    assert files_in(tmp_path) == {*THEIRS, "checkpoint/mine.txt", JOB_FILE}
    assert not (tmp_path / "exported").exists()


def test_a_refused_start_keeps_the_last_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    fill(out, *WRITTEN, "checkpoint/model.safetensors")
    (out / JOB_FILE).write_text(json.dumps(OURS))
    before = files_in(out)
    away = f"unix://{tmp_path}/nobody.sock"
    assert run_quickstart(write_config(tmp_path), out, redis_url=away, engine_layout=None) == 1
    assert "nobody.sock" in capsys.readouterr().err
    assert files_in(out) == before


def test_a_task_that_does_not_exist_keeps_the_last_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused by the first process of the run, when everything but the results is there already."""
    out = tmp_path / "out"
    fill(out, *WRITTEN, "checkpoint/model.safetensors", "prepare.log")
    (out / JOB_FILE).write_text(json.dumps(OURS))
    before = {name: (out / name).read_bytes() for name in files_in(out)}
    assert run_quickstart(write_config(tmp_path, data__task="nope"), out, redis_url=None, engine_layout=None) == 1
    said = capsys.readouterr().err
    assert "data.task 'nope'" in said and str(out / REFUSED_LOG) in said and len(said.splitlines()) == 1
    after = {name: (out / name).read_bytes() for name in files_in(out)}
    assert after.pop(REFUSED_LOG) and after == before


def test_a_folder_with_nothing_but_a_refused_start_can_be_used(tmp_path: Path) -> None:
    fill(tmp_path, REFUSED_LOG)
    refuse_foreign(tmp_path)
    fill(tmp_path, "mine.txt")
    with pytest.raises(ValueError, match="--out"):
        refuse_foreign(tmp_path)


def test_prepared_files_take_the_places_of_forgotten_ones(tmp_path: Path) -> None:
    aside, out = tmp_path / "aside", tmp_path / "out"
    fill(aside, "train.jsonl", "checkpoint/config.json")
    fill(out, "checkpoint/mine.txt")
    (out / "train.jsonl").write_text("old")
    take_over(aside, out)
    assert files_in(out) == {"train.jsonl", "checkpoint/config.json", "checkpoint/mine.txt"}
    assert (out / "train.jsonl").read_text() == "precious" and not files_in(aside)


def test_a_temporary_folder_that_urls_and_sockets_cannot_carry_is_named() -> None:
    refuse_unfit("/tmp/a b%41é")
    for folder, words in [("/tmp/" + "é" * 26, "57 bytes"), ("/tmp/a#b", "TMPDIR"), ("/tmp/a?b", "TMPDIR")]:
        with pytest.raises(ValueError, match=words):
            refuse_unfit(folder)


def test_processes_that_do_not_end_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(folder: Path) -> list[str]:
        raise owned.StillRunning("processes [7] of run r do not end")

    monkeypatch.setattr("megastream.rl.launch.sweep", stuck)
    assert run_quickstart(write_config(tmp_path), tmp_path / "out", redis_url=None, engine_layout=None) == 1
    assert capsys.readouterr().err == "megastream: processes [7] of run r do not end\n"
