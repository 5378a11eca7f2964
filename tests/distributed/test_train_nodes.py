"""`megastream train` as people start it: once on every node. Two nodes are two launchers on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megastream.rl.torchrun import run_train
from tests.helpers.small_run import ROOT, wait_for
from tests.helpers.train_job import STEPS, begin, job, lines, run, trace, whole_checkpoints, write_config, write_files

END_S = 200.0


def free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def start(path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megastream.cli.main", "train", str(path)]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def end(launchers: list[subprocess.Popen[str]]) -> list[tuple[int, list[str]]]:
    """Exit code and what `megastream` itself said, of each launcher."""
    ends = []
    try:
        for launcher in launchers:
            _, said = launcher.communicate(timeout=END_S)
            if launcher.returncode not in (0, 1):
                raise AssertionError(said)
            ends.append((launcher.returncode, [line for line in said.splitlines() if line.startswith("megastream: ")]))
            print(said)  # shown when the test fails
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()
    return ends


def nodes(tmp_path: Path, count: int = 2, **changes: Any) -> list[subprocess.Popen[str]]:
    """All launchers of one run, each with the same file."""
    meeting = {"nodes": count, "ranks_per_node": 4 // count, "address": free_address()}
    path = write_config(tmp_path, job(tmp_path, rendezvous=meeting, **changes))
    return [start(path) for _ in range(count)]


def rank_processes(path: Path) -> list[int]:
    """Ranks of the run, by their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"megastream.rl.torchrun" in words and str(path).encode() in words:
            found.append(int(entry.parent.name))
    return sorted(found)


@pytest.mark.full
def test_two_nodes_train_what_one_trains(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        write_files(folder)
    assert run(job(one, run__steps=3)) == [""] * 4
    ends = end(nodes(two, run__steps=3))
    assert [code for code, _ in ends] == [0, 0], ends
    assert trace(two) == trace(one) and len(trace(two)) == 3
    said = [line for _, spoken in ends for line in spoken]
    assert said[1:] == [f"megastream: step 0 of 3, from {two / 'weights'}"], "rank 0 only"
    assert "finality pipelined, clipping at 0.5: a bucket leaves once" in said[0]


@pytest.mark.full
def test_a_node_that_loses_a_rank_ends_the_run_and_the_next_start_goes_on(tmp_path: Path) -> None:
    """The same run id and folder again: nothing of the first start is in the way."""
    write_files(tmp_path)
    launchers = nodes(tmp_path, run__steps=400)
    path = tmp_path / "train.yaml"
    wait_for("a checkpoint", lambda: any(line["kind"] == "saved" for line in lines(tmp_path)), 60)
    os.kill(rank_processes(path)[-1], signal.SIGKILL)
    ends = end(launchers)
    assert all(code == 1 for code, _ in ends), ends
    wait_for("all ranks to end", lambda: not rank_processes(path), 20)
    newest = whole_checkpoints(tmp_path)[-1]
    ends = end(nodes(tmp_path, run__steps=newest + 2))
    assert [code for code, _ in ends] == [0, 0], ends
    assert [line["step"] for line in lines(tmp_path) if line["kind"] == "start"] == [0, newest]
    assert all(len(values) == 1 for values in trace(tmp_path).values()), "a repeated step gives the same again"


@pytest.mark.full
def test_ranks_end_with_their_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed launcher leaves its folder
    write_files(tmp_path)
    (launcher,) = nodes(tmp_path, 1, run__steps=400)
    try:
        wait_for("a step", lambda: bool(trace(tmp_path)), 60)
    finally:
        launcher.kill()
        launcher.communicate()
    wait_for("all ranks to end", lambda: not rank_processes(tmp_path / "train.yaml"), 20)


@pytest.mark.full
def test_an_interrupted_launcher_speaks_for_its_ranks_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary := tmp_path / "temporary"))
    temporary.mkdir()
    write_files(tmp_path)
    (launcher,) = nodes(tmp_path, 1, run__steps=400)
    try:
        wait_for("a step", lambda: bool(trace(tmp_path)), 60)
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 130 and "Traceback" not in said, said
    assert said.strip().splitlines()[-1] == "megastream: SIGINT: the ranks of this node were stopped"
    wait_for("all ranks to end", lambda: not rank_processes(tmp_path / "train.yaml"), 20)
    assert list(temporary.iterdir()) == []


def refusals(ends: list[tuple[int, list[str]]]) -> list[str]:
    """What ranks said, on all nodes; every launcher has failed."""
    assert all(code == 1 for code, _ in ends), ends
    return [line for _, spoken in ends for line in spoken if "ended first" not in line]


@pytest.mark.full
def test_what_all_ranks_refuse_is_said_once(tmp_path: Path) -> None:
    write_files(tmp_path)
    (line,) = refusals(end(nodes(tmp_path, layout__stage_layers=[1, 1])))
    assert "stage_layers=[1, 1] has 2 layers, the model 4" in line and "trainer rank" not in line


@pytest.mark.full
def test_weights_that_one_node_alone_has_not_end_both(tmp_path: Path) -> None:
    """The other one's ranks would wait for it for longer than this test does."""
    write_files(tmp_path)
    meeting = {"nodes": 2, "ranks_per_node": 2, "address": free_address()}
    raw = job(tmp_path, rendezvous=meeting, deadlines__step_s=4 * END_S)
    (tmp_path / "other").mkdir()
    paths = [
        write_config(tmp_path, raw),
        write_config(tmp_path / "other", {**raw, "weights": f"{tmp_path}/not-here"}),
    ]
    (line,) = refusals(end([start(path) for path in paths]))
    assert f"weights {tmp_path}/not-here: " in line
    assert lines(tmp_path) == [] and not any(rank_processes(path) for path in paths)


def _wrong_file_body(rank: int, world_size: int, init_method: str, raw: dict[str, Any]) -> None:
    """As another launcher starts ranks: each of them reads the file of its own node."""
    host, port = raw["rendezvous"]["address"].split(":")
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=port)
    folder = Path(raw["run"]["folder"]).parent / f"node{rank}"
    folder.mkdir()
    code = run_train(write_config(folder, {**raw, "weigths": "here"} if rank == 1 else raw))
    sys.stderr.flush()
    os._exit(code)


@pytest.mark.full
def test_a_file_that_is_wrong_on_one_node_alone_ends_both(tmp_path: Path) -> None:
    write_files(tmp_path)
    two = {"ranks_per_node": 2, "address": free_address()}
    raw = job(tmp_path, rendezvous=two, layout__pp=1, deadlines__step_s=4 * END_S)
    codes = begin(raw, tmp_path / "ranks", 2, _wrong_file_body).wait(100)
    said = [(tmp_path / "ranks" / f"{rank}.log").read_text() for rank in range(2)]
    assert codes == [1, 1], said
    spoken = [line for each in said for line in each.splitlines() if line.startswith("megastream: ")]
    assert len(spoken) == 1 and "trainer rank 1: " in spoken[0] and "weigths" in spoken[0], said


@pytest.mark.full
def test_a_bad_checkpoint_is_one_line_of_rank_0_and_everybody_stops(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert run(job(tmp_path, run__steps=2)) == [""] * 4
    next((tmp_path / "run" / "checkpoints" / "step_00000002").glob("*.distcp")).unlink()
    ends = end(nodes(tmp_path))
    assert all(code == 1 for code, _ in ends), ends
    said = [line for _, spoken in ends for line in spoken if "ended first" not in line]
    assert len(said) == 1 and ".distcp is missing" in said[0], ends
    assert len(trace(tmp_path)) == 2 < STEPS
