"""How `megastream train` begins and ends on a rank, without one: what is loaded, what is waited for, who says what."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megastream.rl import streaming, torchrun, train_run
from megastream.rl.job import LineLog
from megastream.rl.start_lines import print_start
from megastream.rl.streaming import Streaming
from megastream.rl.torchrun import run_train
from megastream.rl.train_config import parse_train_config
from megastream.rl.train_run import Place, Trainer
from megastream.rl.watermark import BLOCK, Watermark
from megastream.sync import SyncError
from megastream.trainer import agreement
from megastream.trainer.agreement import AgreedError
from megastream.trainer.checkpoint_types import Resumed
from megastream.trainer.stepper import StepResult
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.train_job import STEPS, job, write_config, write_files


class Checkpoints:
    """Stands for a `Checkpointer` whose folder holds `own`; remembers what it was asked for."""

    def __init__(self, own: Path | None) -> None:
        self._own, self.calls = own, []

    def open(self) -> list[str]:
        return []

    def load(self, which: Path | None = None, *, allow_changed: Any, weights_only: bool = False) -> Resumed | None:
        path = which or self._own
        self.calls.append(("load", which, tuple(allow_changed), weights_only))
        return None if path is None else Resumed(3, path, {}, (), False, weights_only)

    def poll(self, *, wait: bool) -> None:
        self.calls.append(("poll", wait))

    def close(self) -> None: ...


def trainer(tmp_path: Path, checkpoints: Checkpoints, **changes: Any) -> Trainer:
    config = parse_train_config(job(tmp_path, **changes))
    nothing: Any = None
    return Trainer(config, "launch", nothing, [], nothing, Adapter(), checkpoints, None, step=STEPS, coords={})  # type: ignore[arg-type]


class Adapter:
    def stepper(self, *args: Any, **kwargs: Any) -> Adapter:
        return self

    def close(self) -> None: ...


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("has_own", [False, True])
def test_a_training_that_began_elsewhere_goes_on_from_its_own(
    tmp_path: Path, has_own: bool, weights_only: bool
) -> None:
    """The same file at every start: it begins at the path once, not again and again."""
    other, own = tmp_path / "other/step_00000100", tmp_path / "run/checkpoints/step_00000120"
    checkpoints = Checkpoints(own if has_own else None)
    started = trainer(tmp_path, checkpoints, checkpoint__load=str(other), checkpoint__weights_only=weights_only)
    resumed, _ = train_run._load(started)
    assert resumed is not None and resumed.path == (own if has_own else other)
    assert resumed.weights_only is (weights_only and not has_own)
    others = ("optimizer", "batch", "run", "data") if weights_only else ()
    begins = [] if has_own else [("load", other, others, weights_only)]
    assert checkpoints.calls == [("load", None, (), False), *begins]


def test_one_of_its_own_is_loaded_when_it_is_named(tmp_path: Path) -> None:
    """`Checkpointer.load` refuses it where newer ones lie beside it."""
    own = tmp_path / "run/checkpoints/step_00000100"
    checkpoints = Checkpoints(tmp_path / "run/checkpoints/step_00000120")
    resumed, _ = train_run._load(trainer(tmp_path, checkpoints, checkpoint__load=str(own)))
    assert resumed is not None and resumed.path == own
    assert checkpoints.calls == [("load", own, (), False)]


def test_the_last_checkpoint_is_published_before_engines_can_end_badly(tmp_path: Path) -> None:
    """The training is done by then; otherwise its last steps would be made again."""

    class Broken(Streaming):
        def __init__(self) -> None:
            self._sync = None

        def finished(self) -> None:
            assert checkpoints.calls == [("poll", True)]
            raise SyncError("the engine is gone")

    checkpoints = Checkpoints(None)
    with pytest.raises(SyncError, match="gone"):
        train_run._run(trainer(tmp_path, checkpoints), Broken())


class Skips(Adapter):
    """Every step that `good` does not name, counted from 0, is skipped."""

    def __init__(self, *good: int) -> None:
        self._good, self._step = good, -1

    def step(self) -> StepResult:
        self._step += 1
        return StepResult(self._step in self._good, float("nan"))

    def close(self) -> None: ...


@pytest.mark.parametrize("good", [(), (1,)])
def test_a_training_whose_every_step_was_skipped_has_failed(
    tmp_path: Path, good: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier ones of the checkpoint do not count; the engine is told that the training is done all the same."""
    monkeypatch.setattr(train_run, "_forward_backward", lambda trainer: 1.0)
    monkeypatch.setattr(train_run, "_write_step", lambda *args, **streamed: None)
    monkeypatch.setattr(train_run, "_save", lambda *args: None)
    started = trainer(tmp_path, Checkpoints(None))
    started.optimizer, started.adapter = SimpleNamespace(param_groups=[]), Skips(*good)  # type: ignore[assignment]
    started.step, started.skipped = STEPS - 3, 2
    told = []
    idle = SimpleNamespace(
        listener=None, version=-1, end=lambda ok: None, cost=dict, finished=lambda: told.append("done")
    )
    if good:
        train_run._run(started, idle)  # type: ignore[arg-type]
    else:
        with pytest.raises(AgreedError, match="not finite in every one of 3 steps, and all were skipped"):
            train_run._run(started, idle)  # type: ignore[arg-type]
    assert told == ["done"] and started.step == STEPS


@pytest.mark.parametrize(
    ("error", "calls"),
    [(AgreedError("gradients"), ["engines are told", ("poll", True)]), (SyncError("an engine"), ["engines are told"])],
)
def test_a_save_under_way_is_published_behind_an_error_of_all_ranks(
    tmp_path: Path, error: Exception, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else comes to publish it when one rank alone cannot go on."""
    checkpoints = Checkpoints(None)

    class Failing(Streaming):
        def attach(self, train_step: int, resumed: int) -> None:
            raise error

        def close(self) -> None:
            if "engines are told" not in checkpoints.calls:
                checkpoints.calls.append("engines are told")

    monkeypatch.setattr(train_run, "start", lambda config, place: started)
    monkeypatch.setattr(train_run, "_begin", lambda trainer: None)
    monkeypatch.setattr(train_run, "Streaming", Failing)
    started = trainer(tmp_path, checkpoints)
    with pytest.raises(type(error), match=str(error)):
        train_run.train(started.config, Place(0, 1, ""))
    assert checkpoints.calls == calls


def test_what_else_goes_wrong_with_a_save_does_not_hide_why_the_training_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(Checkpoints):
        def poll(self, *, wait: bool) -> None:
            raise AgreedError("the checkpoint of step 2 cannot be written")

    ended = trainer(tmp_path, Full(None))
    train_run._publish_what_was_saved(ended)
    assert capsys.readouterr().err == "", "not rank 0"
    ended.lines = LineLog(tmp_path / "log")
    train_run._publish_what_was_saved(ended)
    assert capsys.readouterr().err == "megastream: the checkpoint of step 2 cannot be written\n"


@pytest.mark.parametrize("streams", [False, True])
def test_a_start_says_what_its_settings_mean(tmp_path: Path, streams: bool, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"stream__control_url": "redis://h"} if streams else {}
    print_start(parse_train_config(job(tmp_path, **changes)), None, 0)
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == ["finality", *(["ownership"] if streams else []), "step"]


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """No process group: rank 0 of 1. What it would have been started with."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(agreement, "gather", lambda mine: [mine])
    monkeypatch.setattr(Place, "meet", lambda place, deadline_s: given.update(met_s=deadline_s))
    monkeypatch.setattr(train_run, "start_mesh", lambda settings, **kwargs: given.update(kwargs))
    return given


def test_a_log_that_cannot_be_written_is_the_word_of_all_ranks(tmp_path: Path, one_rank: dict[str, Any]) -> None:
    """Raised on rank 0 alone it would be said by a traceback there, and the others would be killed without a word."""
    full = trainer(tmp_path, Checkpoints(None))
    full.lines = LineLog(Path("/dev/full"))
    with pytest.raises(AgreedError, match="No space left on device: '/dev/full'"):
        full.say(kind="step")


def test_versions_that_cannot_be_reserved_are_the_word_of_all_ranks(tmp_path: Path, one_rank: dict[str, Any]) -> None:
    class Full:
        def reserve(self, version: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "versions.json")

    nothing: Any = None
    stream = Streaming(nothing, nothing, "launch")
    stream._sync = SimpleNamespace(accept=list, finish=list, next_version=3, close=list)  # type: ignore[assignment]
    assert stream.end(True) == 2, "on a rank that reserves nothing"
    stream._watermark = Full()  # type: ignore[assignment]
    with pytest.raises(AgreedError, match="No space left on device: 'versions.json'"):
        stream.end(True)


def test_a_start_that_ends_before_its_base_skips_one_block_of_versions(
    tmp_path: Path, one_rank: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MemoryLog(MemoryStore())
    log.raise_version(9)

    class Sync:
        def __init__(self, *args: Any, **named: Any) -> None: ...

        def attach(self, kind: str, train_step: int) -> None:
            raise SyncError("no engine came")

    monkeypatch.setattr(streaming, "RedisLog", lambda *args, **named: log)
    monkeypatch.setattr(streaming, "TrainerSync", Sync)
    monkeypatch.setattr(streaming, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    (tmp_path / "run").mkdir()
    config = parse_train_config(job(tmp_path, stream__control_url="redis://h"))
    for start in (1, 2):
        with pytest.raises(SyncError):
            Streaming(config, Adapter(), "launch").attach(0, -1)  # type: ignore[arg-type]
        assert Watermark(tmp_path / "run" / streaming.WATERMARK_FILE).reserved == 9 + start * BLOCK


@pytest.mark.parametrize("reserved", ["Infinity", "1e30", "1.9", "true", '"7"', "-5"])
def test_a_watermark_that_is_no_version_is_named(tmp_path: Path, reserved: str) -> None:
    (path := tmp_path / "versions.json").write_text(f'{{"reserved": {reserved}}}')
    with pytest.raises(ValueError, match=r"versions\.json does not say which versions were reserved"):
        Watermark(path)


def start(tmp_path: Path) -> None:
    one = {"rendezvous__ranks_per_node": 1, "layout": {}, "deadlines__save_s": 500}
    train_run.start(parse_train_config(job(tmp_path, **one)), Place(0, 1, ""))


def test_what_megatron_asserts_is_everybodys_word(
    tmp_path: Path, one_rank: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(settings: Any) -> Any:
        raise AssertionError("megatron does not like\nthis setting")

    write_files(tmp_path)
    monkeypatch.setattr(train_run, "build", build)
    with pytest.raises(AgreedError, match="^megatron does not like this setting$"):
        start(tmp_path)
    assert one_rank["met_s"] == one_rank["deadline_s"] == 60 + 500, (
        "a step, behind the longest that one rank may wait alone"
    )


def test_missing_weights_are_said_behind_the_meeting(tmp_path: Path, one_rank: dict[str, Any]) -> None:
    """On one node alone they would else end that one, and the others would wait for it."""
    with pytest.raises(AgreedError, match=f"^weights {tmp_path}/weights: "):
        start(tmp_path)
    assert "met_s" in one_rank and "deadline_s" not in one_rank


def test_what_all_ranks_raise_is_said_by_one_of_the_first_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By whoever comes to it first: torchrun ends the slower ones, and rank 0 may be one of them."""

    def train(*args: Any) -> None:
        raise AgreedError("not so")

    monkeypatch.setattr(train_run, "train", train)
    monkeypatch.setattr(torchrun.signal, "signal", lambda *args: None)
    monkeypatch.setattr(torchrun.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *args: None))
    path = write_config(tmp_path, job(tmp_path))

    def said(rank: int, node: int, folder: Path | None) -> str:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4, "GROUP_RANK": node}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv(torchrun._NODE, raising=False)
        if folder is not None:
            folder.mkdir(exist_ok=True)
            monkeypatch.setenv(torchrun._NODE, str(folder))
        assert run_train(path) == torchrun.FAILED
        return capsys.readouterr().err

    line, one, other = "megastream: not so\n", tmp_path / "one", tmp_path / "other"
    assert [said(3, 1, other), said(1, 0, one), said(0, 0, one), said(2, 1, other)] == ["", line, "", ""]
    assert [said(rank, rank // 2, None) for rank in (1, 2, 0)] == ["", "", line], "another launcher has no such folder"


def test_data_of_another_vocabulary_is_refused_before_the_first_step(
    tmp_path: Path, one_rank: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    write_files(tmp_path / "other", vocab=200)
    (tmp_path / "other/tokens.npy").rename(tmp_path / "tokens.npy")
    monkeypatch.setattr(train_run, "build", None)  # so far it must not come
    with pytest.raises(AgreedError, match=r"holds token \d+; the model's vocabulary has 102; tokenize the text"):
        start(tmp_path)
