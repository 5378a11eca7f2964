"""kill -9 of any rank at any moment of a save: the next start goes on from the newest whole checkpoint.

One training is killed again and again in one folder. Every (loss, norm) that it ever logs is the one of the training
that nobody interrupts; a step that is trained again gives the same again.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.helpers import train_job
from tests.helpers.train_job import Running, begin, job, leftovers, lines, run, trace, whole_checkpoints, write_files

END_S = 90.0
"""From the kill of one rank until the others have ended by themselves. Mostly at once; but gloo forgets an operation
whose bytes are on the way when its peer dies, and then the group's deadline ends it (`TrainConfig.group_s`, 60 s here).
"""
WAITS = {"deadlines__step_s": 30, "deadlines__save_s": 30}


def kill_during_a_save(running: Running, folder: Path, chance: random.Random, window_s: float) -> bool:
    """Waits for the save that is drawn, then for a random part of a save. False: the training ended before."""
    before = sum(line["kind"] == "save" for line in lines(folder))
    nth = chance.randint(1, 2)
    if not running.wait_for(lambda: sum(line["kind"] == "save" for line in lines(folder)) >= before + nth, 60):
        return False
    time.sleep(chance.uniform(0, window_s))
    running.kill(chance.randrange(len(running.processes)))
    codes = running.wait(END_S)
    assert None not in codes, f"a rank hangs after another one was killed: {codes}"
    assert any(codes), codes
    return True


def save_window_s(folder: Path) -> float:
    """What a save of the uninterrupted training took at most, from its first collective to its name."""
    return max(line["total_ms"] for line in lines(folder) if line["kind"] == "saved") / 1e3


@pytest.mark.parametrize("moments", [1, pytest.param(20, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
def test_killed_at_random_moments(tmp_path: Path, moments: int) -> None:
    chance = random.Random(moments)
    steps = 6 + 4 * moments
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    for folder in (reference, killed):
        write_files(folder)
    assert run(job(reference, run__steps=steps, **WAITS)) == [""] * 4
    window_s, found_leftovers, resumed = save_window_s(reference), 0, []
    for moment in range(moments):
        before = whole_checkpoints(killed) if (killed / "run" / "checkpoints").exists() else []
        running = begin(job(killed, run__steps=steps, **WAITS), tmp_path / f"ranks-{moment}")
        assert kill_during_a_save(running, killed, chance, window_s), "the training ended before the kill"
        starts = [line for line in lines(killed) if line["kind"] == "start"]
        assert starts[-1]["step"] == (before[-1] if before else 0), "the newest whole one"
        found_leftovers += bool(leftovers(killed))
        resumed.append(starts[-1]["step"])
    newest, left = whole_checkpoints(killed), leftovers(killed)
    assert run(job(killed, run__steps=steps, **WAITS)) == [""] * 4
    last = [line for line in lines(killed) if line["kind"] == "start"][-1]
    assert last["step"] == (newest[-1] if newest else 0) and last["swept"] == left
    assert leftovers(killed) == []
    assert whole_checkpoints(killed) == [steps - 2, steps]
    assert (killed / "run" / "checkpoints" / "CURRENT").read_text() == f"step_{steps:08d}\n"
    assert trace(killed) == trace(reference) and len(trace(killed)) == steps
    assert moments < 20 or found_leftovers > 0, "no kill ever hit a save; the loop proves nothing"
    print(f"{moments} kills within {window_s:.3f} s: {found_leftovers} left an unfinished save; resumed at {resumed}")


def test_the_loop_would_notice_a_changed_loss(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "run").mkdir()
    log = tmp_path / "run" / train_job.LOG_FILE
    log.write_text('{"kind":"step","step":1,"loss":1.0,"grad_norm":1.0}\n' * 2)
    assert trace(tmp_path) == {1: {(1.0, 1.0)}}
    log.write_text(log.read_text() + '{"kind":"step","step":1,"loss":1.0000001,"grad_norm":1.0}\n{"kind":"st')
    assert len(trace(tmp_path)[1]) == 2
