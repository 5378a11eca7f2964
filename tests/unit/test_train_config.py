"""The file of `megastream train`, its schedule, its data by number, and the versions that it reserves."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from megastream.cli.main import app
from megastream.rl.data import Pair, write_pairs
from megastream.rl.job import LineLog
from megastream.rl.rows import Rows
from megastream.rl.schedule import learning_rate
from megastream.rl.sections import ConfigError
from megastream.rl.torchrun import agent_config
from megastream.rl.train_config import OptimizerSection, load_train_config, parse_train_config
from megastream.rl.watermark import BLOCK, Watermark
from megastream.trainer.model import whole_minutes
from tests.helpers.memory_log import MemoryLog, MemoryStore
from tests.helpers.train_job import job

ROOT = Path(__file__).parents[2]


def test_the_file_in_configs_is_valid() -> None:
    config = load_train_config(ROOT / "configs/train.yaml")
    assert config.ranks == 4 and config.stream is None and config.checkpoint is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint__evry_steps": 3}, "unknown key checkpoint.evry_steps; the nearest known key is checkpoint.every"),
        ({"stream__engin": "x"}, "unknown key stream.engin; the nearest known key is stream.engine"),
        ({"batch__global_sequences": 6}, "batch.global_sequences is 6, which replicas x batch.micro_sequences = 4"),
        ({"layout__pp": 3}, "is 4, which layout.tp x layout.cp x layout.pp = 3 does not divide"),
        ({"checkpoint__keep": 0}, "checkpoint.keep is 0; it must be above 0"),
        ({"rendezvous__address": "here"}, "rendezvous.address is 'here'; give host:port"),
        ({"rendezvous__address": "127.0.0.1:99999"}, "'127.0.0.1:99999'; give host:port, a port up to 65535"),
        ({"optimizer__decay_steps": 2}, "decay cosine needs more than the 3 steps of the warm-up"),
        ({"finality": "soon"}, "finality"),
        ({"checkpoint__weights_only": True}, "needs the path of a checkpoint in checkpoint.load"),
        (
            {"stream__control_url": "redis://h:1", "stream__engine": "e", "stream__engines": 2},
            "stream.engine names e, stream.engines is 2; leave engine out",
        ),
        ({"deadlines__lag_s": 0}, "deadlines.lag_s is 0.0; it must be above 0"),
        ({"finality": "early"}, "finality and optimizer.clip_grad: finality 'early' cannot clip"),
        # What would be refused behind the start of all ranks only, by each of them in words of its own:
        ({"max_abort_rate": 1.5}, "max_abort_rate is 1.5; it must be from 0 to 1"),
        ({"stream__control_url": "redis://h:1", "stream__piece_mib": 5000}, "stream.piece_mib is 5000.0; it must be"),
        ({"deadlines__join_s": 1e9}, "deadlines.join_s is 1000000000.0; it must be from 0.1 to 604800"),
        (
            {"layout": {"pp": 4, "vpp": 2}, "batch__global_sequences": 12},
            "/ (replicas x batch.micro_sequences) is 6, which layout.pp = 4 does not divide",
        ),
        (
            {"layout": {"pp": 4, "vpp": 2}, "batch__global_sequences": 4},
            "/ (replicas x batch.micro_sequences) is 2, which layout.pp = 4 does not divide",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_train_config(job(tmp_path, **changes))
    assert words in str(error.value)


def test_nodes_wait_for_each_other_and_for_the_first_ones_store_as_long_as_the_file_says(tmp_path: Path) -> None:
    """torch's own limit for the store is 60 s: a node that is started earlier than that would not wait."""
    agent = agent_config(parse_train_config(job(tmp_path, deadlines__start_s=299.5)), str(tmp_path))
    assert [agent.rdzv_configs[name] for name in ("join_timeout", "read_timeout")] == [300, 300]
    assert (agent.run_id, agent.min_nodes, agent.max_nodes, agent.nproc_per_node) == ("test", 1, 1, 4)


def test_a_collective_outlasts_whatever_one_rank_may_wait_for_alone(tmp_path: Path) -> None:
    """The deadline that is reached first is then the one that names somebody."""
    times = {"step_s": 10, "save_s": 50, "reconnect_s": 5, "lag_s": 30, "join_s": 40}
    deadlines = {f"deadlines__{name}": seconds for name, seconds in times.items()}
    both = parse_train_config(job(tmp_path, stream__control_url="redis://h:1", **deadlines))
    saving = parse_train_config(job(tmp_path, **deadlines))
    alone = parse_train_config({**job(tmp_path, **deadlines), "checkpoint": None})
    assert (both.group_s, saving.group_s, alone.group_s) == (10 + 75, 10 + 50, 10)
    assert [whole_minutes(seconds) for seconds in (0.5, 60, 89, 150)] == [1, 1, 2, 3], "never less than asked for"


def test_the_command_refuses_a_wrong_file_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(job(tmp_path, run__step=3)))
    result = CliRunner().invoke(app, ["train", str(path)])
    assert result.exit_code == 2
    assert (
        result.stderr.count("\n") == 1 and "unknown key run.step; the nearest known key is run.steps" in result.stderr
    )


def test_the_rate_is_a_function_of_the_step() -> None:
    given = OptimizerSection(
        learning_rate=1.0, min_learning_rate=0.2, warmup_steps=4, decay="linear", decay_steps=8, clip_grad=1.0
    )
    assert [learning_rate(given, step) for step in range(10)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )
    assert learning_rate(OptimizerSection(learning_rate=0.5), 1000) == 0.5
    cosine = OptimizerSection(learning_rate=1.0, decay="cosine", decay_steps=8)
    assert [learning_rate(cosine, step) for step in (0, 4, 8, 9)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def rows(path: Path, tokens: np.ndarray, length: int = 3, vocab: int = 1000, seed: int = 1) -> Rows:
    np.save(path / "t.npy", tokens)
    return Rows(path / "t.npy", length, vocab, seed)


def test_a_sequence_is_the_same_under_every_layout_and_every_epoch_has_all(tmp_path: Path) -> None:
    found = rows(tmp_path, np.arange(31))
    assert found.count == 10
    whole = np.concatenate(list(found.step(4, 8, 2, 0, 1)))
    parts = np.concatenate([block for replica in range(4) for block in found.step(4, 8, 1, replica, 4)])
    assert np.array_equal(whole, parts) and whole.shape == (8, 4)
    first, second = found.take(0, 10), found.take(10, 10)
    assert sorted(first[:, 0]) == sorted(second[:, 0]) == list(range(0, 30, 3))
    assert not np.array_equal(first, second), "another order in every epoch"
    assert np.array_equal(found.take(7, 6), np.concatenate([first[7:], second[:3]]))


def _refuses(rows: Rows, part: int) -> str:
    try:
        rows.check(part, 4)
    except ValueError as error:
        return re.findall(r"token -?\d+", str(error))[0]
    return ""


def test_data_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token 30; the model's vocabulary has 30; tokenize the text for this model"):
        rows(tmp_path, np.arange(31), vocab=30).take(0, 10)
    for bad in (-1, 30):
        for at in range(31):
            tokens = np.arange(31) % 30
            tokens[at] = bad
            found = rows(tmp_path, tokens, vocab=30)
            assert [_refuses(found, part) for part in range(4)].count(f"token {bad}") == 1, "every token is looked at"
    with pytest.raises(ValueError, match="holds 3 tokens; data.seq_length = 3 needs one more"):
        rows(tmp_path, np.arange(3))
    with pytest.raises(ValueError, match="float64 of shape"):
        rows(tmp_path, np.zeros(9))
    with pytest.raises(ValueError, match="neither .jsonl"):
        Rows(tmp_path / "t.txt", 3, 10, 1)


def test_facts_tell_two_files_apart(tmp_path: Path) -> None:
    one, other = rows(tmp_path, np.arange(31)).facts(), rows(tmp_path, np.arange(1, 32)).facts()
    assert one != other and one == rows(tmp_path, np.arange(31)).facts()
    write_pairs(tmp_path / "p.jsonl", [Pair("1 + 1", "2")] * 9)
    assert Rows(tmp_path / "p.jsonl", 4, 260, 1).count > 9


def test_a_change_in_the_middle_of_a_data_file_shows(tmp_path: Path) -> None:
    tokens = np.zeros(36 << 20, dtype=np.uint8)
    before = rows(tmp_path, tokens).facts()
    tokens[len(tokens) // 2] = 1
    assert rows(tmp_path, tokens).facts() != before


def test_versions_stay_above_what_was_published_though_the_control_plane_forgot(tmp_path: Path) -> None:
    path = tmp_path / "versions.json"
    first = Watermark(path)
    log = MemoryLog(MemoryStore())
    first.lift(log)
    assert log.highest_version() == -1, "a new run begins at 0"
    first.reserve(0)
    for version in range(40):
        first.reserve(version)
        assert Watermark(path).reserved >= version, "on the disk before anybody sees it"
    forgetful = MemoryLog(MemoryStore())
    second = Watermark(path)
    second.lift(forgetful)
    assert 39 <= forgetful.highest_version() < 39 + BLOCK
    resumed = MemoryLog(MemoryStore())
    Watermark(tmp_path / "of another folder").lift(resumed, 12)
    assert resumed.highest_version() == 12, "a checkpoint's version is all that is left"
    path.write_text("{}")
    with pytest.raises(ValueError, match="does not say which versions were reserved"):
        Watermark(path)


def test_a_file_on_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system names it only where it cannot be opened."""

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lines = LineLog(Path("/dev/full"))
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        lines.write(kind="step")
    lines.close()  # nothing is left to be written
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/versions.json'"):
        Watermark(tmp_path / "versions.json").reserve(0)
